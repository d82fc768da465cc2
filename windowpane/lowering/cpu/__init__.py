"""C kernels for float32 on CPUs."""
