"""Compiled kernels: built with the machine's own C compiler where there is one, never required."""
