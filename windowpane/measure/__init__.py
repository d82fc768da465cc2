"""What `windowpane bench` measures: workloads, rounds and their report."""
