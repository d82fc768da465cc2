"""Triton and Hopper kernels."""
