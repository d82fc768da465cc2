"""GPU spike: small kernels that settle the memory layout on real hardware. docs/gpu-layout.md says what they showed."""
