"""`windowpane bench`: fixed workloads on a real engine, and how far from the device's roof they run."""
