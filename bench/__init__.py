"""Benchmarks: each prints a small table, names hardware and versions, and ends with one JSON line."""
