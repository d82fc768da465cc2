"""Quantized weights as plain matrices, for products of so many rows that reading them twice costs little."""

# mypy: disable-error-code="assignment,import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from windowpane.modeling.quantized import PackedWeight
from windowpane.modeling.triton.launch import fixed_by, stride_of
from windowpane.modeling.triton.unpacking import decode, fetch, scale_of


def dequantize_into(weight: PackedWeight, out: torch.Tensor) -> None:
    """The matrix in `out` [outputs, inputs], its columns in the order of the units."""
    outputs, inputs = weight.shape
    _dequantize_kernel[(triton.cdiv(outputs, 16), triton.cdiv(weight.units.shape[1], 32))](
        weight.units,
        weight.scales,
        weight.zeros,
        out,
        weight.units.stride(0),
        weight.scales.stride(0),
        stride_of(weight.zeros),
        out.stride(0),
        outputs,
        inputs,
        weight.scales.shape[1],
        **fixed_by(weight),
        TILE=16,
        num_warps=4,
    )


@triton.jit
def _dequantize_kernel(
    U, S, Z, OUT, u_stride, s_stride, z_stride, out_stride, outputs, inputs, groups, TILE: tl.constexpr,
    IS_INT4: tl.constexpr, GROUP: tl.constexpr, SCALE_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """One block of inputs of TILE outputs."""
    n = tl.minimum(tl.program_id(0) * TILE + tl.arange(0, TILE), outputs - 1).to(tl.int64)
    block = tl.program_id(1)
    j = tl.arange(0, 32)
    z_at = Z
    if Z is not None:
        z_at = Z + n * z_stride
    s_at = S + n // SCALE_OUTPUTS * s_stride
    u = tl.load(U + n[:, None] * u_stride + (block * 32 + j)[None, :])
    # One scale for all inputs is a group that never ends.
    scales, zeros = fetch(s_at, z_at, block, groups, GROUP or 2**30, False)
    w = decode(u, zeros, tl.float32, Z is not None, GROUP, False, IS_INT4, False)
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    for span in tl.static_range(4):
        k = block * 128 + span * 32 + j
        value = w[span] * scale_of(scales, span, tl.float32, GROUP, False).to(tl.float32)[:, None]
        to = OUT + m.to(tl.int64)[:, None] * out_stride + k[None, :]
        tl.store(to, value.to(OUT.dtype.element_ty), mask=(m[:, None] < outputs) & (k[None, :] < inputs))
