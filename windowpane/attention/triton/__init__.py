"""Attention over pages in Triton: decode, prefill and write. On CUDA; on a CPU in Triton's interpreter, for tests."""
