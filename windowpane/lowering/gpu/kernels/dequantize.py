"""Quantized weights as plain matrices, for products of so many rows that reading them twice costs little."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from windowpane.lowering.gpu.kernels.launch import Operands
from windowpane.lowering.gpu.kernels.unpacking import decode, fetch, scale_of
from windowpane.lowering.packed import PackedWeight

# Outputs of a program, and blocks of inputs that it loads before it decodes the first.
TILE, BLOCKS, WARPS = 32, 4, 4


def dequantize_into(weight: PackedWeight, out: torch.Tensor) -> None:
    """The matrix in `out` [outputs, inputs], its columns in the order of the units."""
    outputs, inputs = weight.shape
    operands, blocks = Operands.of(weight, out.dtype), triton.cdiv(inputs, 128)
    _dequantize_kernel[(triton.cdiv(outputs, TILE), triton.cdiv(blocks, BLOCKS))](
        *operands.tensors, out, *operands.strides, out.stride(0), outputs, inputs, blocks, weight.scales.shape[1],
        **operands.fixed, TILE=TILE, BLOCKS=BLOCKS, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _dequantize_kernel(
    U, S, Z, OUT, u_stride, s_stride, z_stride, out_stride, outputs, inputs, blocks, groups, TILE: tl.constexpr,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_OUTPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr, WORDS: tl.constexpr, USES_ASM: tl.constexpr,
):  # fmt: skip
    """Some blocks of inputs of TILE outputs. Beyond the last, the last is read again."""
    # The product of a value and a scale of 16 bits is rounded once, whichever of both multiplies them.
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n = tl.minimum(m, outputs - 1).to(tl.int64)
    j = tl.arange(0, 32)
    z_at = Z
    if Z is not None:
        z_at = Z + n * z_stride
    s_at = S + n // SCALE_OUTPUTS * s_stride
    first = tl.program_id(1) * BLOCKS
    u_at = U + n[:, None] * u_stride + j[None, :]
    units = ()
    for i in tl.static_range(BLOCKS):
        units += (tl.load(u_at + tl.minimum(first + i, blocks - 1) * 32),)
    to = OUT + m.to(tl.int64)[:, None] * out_stride + j[None, :]
    for i in tl.static_range(BLOCKS):
        block = tl.minimum(first + i, blocks - 1)
        # One scale for all inputs is a group that never ends.
        scales, zeros = fetch(s_at, z_at, block, groups, GROUP or 2**30, WORDS)
        w = decode(units[i], zeros, DTYPE, Z is not None, GROUP, WORDS, KIND, USES_ASM)
        for span in tl.static_range(4):
            scale = scale_of(scales, span, DTYPE, GROUP, WORDS, KIND)[:, None]
            if WORDS or S.dtype.element_ty == DTYPE:
                value = (w[span] * scale).to(DTYPE)
            else:
                value = (w[span].to(tl.float32) * scale.to(tl.float32)).to(DTYPE)
            mask = (m < outputs)[:, None] & (first + i < blocks)
            if not IS_WHOLE:
                mask = mask & (block * 128 + span * 32 + j < inputs)[None, :]
            tl.store(to + (block * 128 + span * 32), value, mask=mask)
