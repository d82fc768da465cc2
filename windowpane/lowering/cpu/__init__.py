"""C kernels for float32 on CPUs: the reference with faster operations, and whole decoding layers in one call."""
