"""Attention kernels for Hopper GPUs, in Gluon: TMA and warp specialization. Everything else runs the plain kernels."""
