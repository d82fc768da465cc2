"""Products of 17 and more rows with quantized weights, of every scheme and dtype and for every device.

A program has a tile of outputs by rows. Scales are applied to weights, which are rounded as those of a dequantised
matrix are. Where outputs are too few to keep the device busy, programs share the inputs, and `_add_kernel` adds what
they found. No sum depends on timing. What other kernels have written is read past the L1 cache: where launches overlap,
it may hold what the kernel before the one before has read.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from windowpane.lowering.gpu.kernels.launch import Launch, Operands, wait_if_overlapped
from windowpane.lowering.gpu.kernels.unpacking import decode, fetch, scale_of
from windowpane.lowering.packed import PackedWeight


def plan_tiles(rows: int, outputs: int, inputs: int, processors: int) -> Launch:
    """`processors`: multiprocessors of the device."""
    tile_rows = min(128, max(32, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(outputs, 128) * triton.cdiv(rows, tile_rows)
    # Two programs fit on a multiprocessor: one multiplies while the other decodes.
    programs = max(1, min(8, 2 * processors // tiles, inputs // 1024))
    return Launch(128, tile_rows, 8, 2, programs)


def tiled_product(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor, launch: Launch, *, pdl: bool
) -> None:
    """out = x · weightᵀ + bias; `x` has its inputs in the order of the units."""
    rows, (outputs, inputs) = len(x), weight.shape
    operands = Operands.of(weight, x.dtype)
    grid = (triton.cdiv(rows, launch.rows), triton.cdiv(outputs, launch.outputs), launch.programs)
    shared = launch.programs > 1
    sums = torch.empty(launch.programs, rows, outputs, dtype=torch.float32, device=x.device) if shared else None
    target = out if sums is None else sums
    _tile_kernel[grid](
        x, *operands.tensors, None if shared else bias, target, x.stride(0), *operands.strides, target.stride(-2),
        rows * outputs, rows, outputs, inputs, weight.scales.shape[1], **operands.fixed, OUTPUTS=launch.outputs,
        TILE_ROWS=launch.rows, STAGES=launch.stages, PDL=pdl, num_warps=launch.warps, launch_pdl=pdl,
    )  # fmt: skip
    if sums is not None:
        block = 1024
        _add_kernel[(rows, triton.cdiv(outputs, block))](
            sums, bias, out, out.stride(0), rows, outputs,
            PROGRAMS=launch.programs, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip


@triton.jit
def _four(x):
    return (x, x, x, x)


@triton.jit
def _tile_kernel(
    X, U, S, Z, BIAS, OUT, x_stride, u_stride, s_stride, z_stride, out_stride, program_stride, rows, outputs, inputs,
    groups, OUTPUTS: tl.constexpr, TILE_ROWS: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, SCALE_OUTPUTS: tl.constexpr, IS_WHOLE: tl.constexpr, WORDS: tl.constexpr,
    USES_ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row tile, output tile, share of the inputs); the weight's outputs are the tensor core's rows."""
    wait_if_overlapped(PDL)
    DTYPE: tl.constexpr = X.dtype.element_ty
    # Beyond the last output, the last is read again: its loads need no mask, and its result is not stored.
    n = tl.minimum(tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS), outputs - 1).to(tl.int64)
    j = tl.arange(0, 32)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = (row < rows)[None, :]
    at = U + n[:, None] * u_stride + j[None, :]
    s_at = S + n // SCALE_OUTPUTS * s_stride
    z_at = Z
    if Z is not None:
        z_at = Z + n * z_stride
    x_at = X + row.to(tl.int64)[None, :] * x_stride + j[:, None]
    blocks = tl.cdiv(inputs, 128)
    share = tl.cdiv(blocks, tl.num_programs(2))
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, blocks)
    sums = tl.zeros([OUTPUTS, TILE_ROWS], tl.float32)
    only = ()
    if GROUP == 0 and Z is not None:
        only = _four(tl.load(z_at))
    for block in tl.range(begin, end, num_stages=STAGES):
        u = tl.load(at + block * 32)
        if GROUP == 0:
            w = decode(u, only, DTYPE, Z is not None, GROUP, False, KIND, USES_ASM)
        else:
            scales, zeros = fetch(s_at, z_at, block, groups, GROUP, WORDS)
            w = decode(u, zeros, DTYPE, Z is not None, GROUP, WORDS, KIND, USES_ASM)
        for span in tl.static_range(4):
            mask = is_row
            if not IS_WHOLE:
                mask = mask & (block * 128 + span * 32 + j[:, None] < inputs)
            x = tl.load(x_at + (block * 128 + span * 32), mask=mask, other=0.0, cache_modifier=".cg")
            if GROUP == 0:
                scaled = w[span]
            elif WORDS or S.dtype.element_ty == DTYPE:
                scaled = (w[span] * scale_of(scales, span, DTYPE, GROUP, WORDS, KIND)[:, None]).to(DTYPE)
            else:
                scale = scale_of(scales, span, DTYPE, GROUP, WORDS, KIND).to(tl.float32)
                scaled = (w[span].to(tl.float32) * scale[:, None]).to(DTYPE)
            sums = tl.dot(scaled, x, sums, input_precision="ieee")
    if GROUP == 0:
        sums *= tl.load(s_at).to(tl.float32)[:, None]
    if BIAS is not None:
        sums += tl.load(BIAS + n).to(tl.float32)[:, None]
    m = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    kept = (m[:, None] < outputs) & is_row
    to = OUT + tl.program_id(2).to(tl.int64) * program_stride + row.to(tl.int64)[None, :] * out_stride + m[:, None]
    tl.store(to, sums.to(OUT.dtype.element_ty), mask=kept)


@triton.jit
def _add_kernel(
    SUMS, BIAS, OUT, out_stride, rows, outputs, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """What programs that share the inputs found, always added in the same order."""
    wait_if_overlapped(PDL)
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for program in tl.static_range(PROGRAMS):
        total += tl.load(SUMS + (program * rows + row) * outputs + m, mask=m < outputs, other=0.0, cache_modifier=".cg")
    if BIAS is not None:
        total += tl.load(BIAS + m, mask=m < outputs, other=0.0).to(tl.float32)
    tl.store(OUT + row * out_stride + m, total.to(OUT.dtype.element_ty), mask=m < outputs)
