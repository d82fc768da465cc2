"""Tensor parallelism: one process per rank, the same plan on each, and steps sent by value from rank 0."""
