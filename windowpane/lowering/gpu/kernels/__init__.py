"""What a decoder does between its matrix products, each step one launch, and the products of a few rows themselves.

All kernels are plain Triton and run in its interpreter too. They compute what the reference computes,
rounding where it rounds. Outputs belong to the caller, so that a captured graph always finds its buffers; tensors are
rows with a stride, contiguous along the last axis.

`pdl` (programmatic dependent launch, Hopper and later) lets a kernel start while the one before it still runs. It then
fetches weights, which no kernel writes, and waits before it touches anything else. Every kernel in such a chain waits,
so that whatever ran earlier has finished too.
"""
