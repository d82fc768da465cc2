"""From what a user typed to an engine that runs, and the loop that runs it."""
