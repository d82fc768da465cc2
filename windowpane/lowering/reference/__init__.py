"""Plain torch, on any device: the yardstick for the other lowerings."""
