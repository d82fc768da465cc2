"""Checks that need a GPU; `bench.gpu_check` runs them all."""
