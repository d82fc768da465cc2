"""Experts of many rows: pairs of a row and an expert are sorted by expert, and each expert multiplies its own.

A program of `grouped_product` has one block of `experts_sorted` and a tile of outputs. Grids are as large as shapes
allow; programs beyond the last block return at once. `add_pairs` adds the results of a row in order. No sum depends on
timing or on other rows.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels.experts_activation import (
    NO_ACTIVATION,
    gate_values,
    is_gated,
    ungated,
    weight_rows,
)
from windowpane.lowering.gpu.kernels.experts_sorted import Sorted
from windowpane.lowering.gpu.kernels.launch import Operands, wait_if_overlapped
from windowpane.lowering.gpu.kernels.unpacking import decode, fetch, scale_of
from windowpane.lowering.packed import PackedWeight
from windowpane.lowering.reference.routing import Routing

# Neighbouring blocks, mostly of one expert, that take the same weights one after the other.
GROUP_BLOCKS = 8
# Rows of a gate and of what it gates in turn: both are in the same thread's registers of an accumulator.
_RUN = tl.constexpr(8)


class Grouped(NamedTuple):
    """Pairs of a block, outputs of a tile, inputs of a step (128 of quantized weights), warps, and steps under way.

    `tma`: plain weights are copied as boxes by the hardware for that (Hopper and later).
    """

    rows: int
    outputs: int
    step: int
    warps: int
    stages: int
    tma: bool = False


def grouped_product(
    x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None, routing: Routing,
    by_expert: Sorted, out: torch.Tensor, *, local: int, activation: int, limit: float, alpha: float, weighted: bool,
    launch: Grouped, pdl: bool,
) -> None:  # fmt: skip
    """With an `activation`, out [pairs by expert, width] of `x` [rows, inputs], where `weighted` times their shares;
    else out [pairs, outputs] of `x` [pairs by expert, inputs].
    """
    outputs, inputs = weight.shape[0] // local, weight.shape[1]
    tiles, blocks = ceil_div(outputs, launch.outputs), len(by_expert.blocks)
    grid = (ceil_div(blocks, GROUP_BLOCKS) * GROUP_BLOCKS * tiles,)
    common = {
        "CHOSEN": routing.ids.shape[1], "WEIGHTED": weighted, "ACTIVATION": activation, "OUTPUTS": launch.outputs,
        "ROWS": launch.rows, "STAGES": launch.stages, "GROUP_BLOCKS": GROUP_BLOCKS, "PDL": pdl,
        "num_warps": launch.warps, "launch_pdl": pdl,
    }  # fmt: skip
    tensors, numbers = (
        (bias, routing.shares, *by_expert[:3], out),
        (out.stride(0), outputs, inputs, tiles, limit, alpha),
    )
    if isinstance(weight, PackedWeight):
        operands = Operands.of(weight, x.dtype)
        grouped_packed_kernel[grid](
            x, *operands.tensors, *tensors, x.stride(0), *operands.strides, *numbers, weight.scales.shape[1],
            **operands.fixed, **common,
        )  # fmt: skip
        return
    if launch.tma:
        box = launch.outputs // 2 if is_gated(activation) else launch.outputs
        boxes_kernel[grid](
            x, TensorDescriptor.from_tensor(weight, [box, launch.step]), *tensors, x.stride(0), *numbers,
            STEP=launch.step, IS_WHOLE=inputs % launch.step == 0, **common,
        )  # fmt: skip
        return
    grouped_kernel[grid](
        x, weight, *tensors, x.stride(0), weight.stride(0), *numbers, STEP=launch.step,
        IS_WHOLE=inputs % launch.step == 0, **common,
    )  # fmt: skip


def add_pairs(
    results: torch.Tensor, routing: Routing, out: torch.Tensor, *, first: int, local: int, weighted: bool, pdl: bool
) -> None:
    """out [rows, outputs]: the results [pairs, outputs] of each row in order, `weighted` by their shares."""
    rows, outputs = out.shape
    block = 1024
    add_kernel[(rows, ceil_div(outputs, block))](
        results, routing.ids, routing.shares, out, results.stride(0), out.stride(0), outputs, first, local,
        CHOSEN=routing.ids.shape[1], BLOCK=block, WEIGHTED=weighted, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _fresh(at):
    """What an earlier kernel has written, past an L1 cache that may hold what was there before."""
    return tl.load(at, cache_modifier=".cg")


@triton.jit
def _place(tiles, GROUP_BLOCKS: tl.constexpr):
    """This program's block and tile of outputs."""
    group = tl.program_id(0) // (GROUP_BLOCKS * tiles)
    within = tl.program_id(0) - group * (GROUP_BLOCKS * tiles)
    return group * GROUP_BLOCKS + within % GROUP_BLOCKS, within // GROUP_BLOCKS


@triton.jit
def _load_x(x_at, start, k, inputs, IS_WHOLE: tl.constexpr):
    """Inputs from `start` on [inputs, pairs]. IS_WHOLE: steps end where inputs end."""
    if IS_WHOLE:
        return tl.load(x_at + start, cache_modifier=".cg")
    else:  # noqa: RET505 - both branches are compiled unless one is chosen here
        return tl.load(x_at + start, mask=(start + k < inputs)[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def grouped_kernel(
    X, W, BIAS, SHARES, PAIRS, BLOCKS, COUNT, OUT, x_stride, w_stride, out_stride, outputs, inputs, tiles, limit,
    alpha, CHOSEN: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr, IS_WHOLE: tl.constexpr, WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The weight's outputs are the tensor core's rows; pairs are its columns, of which there may be few."""
    wait_if_overlapped(PDL)
    block, tile = _place(tiles, GROUP_BLOCKS)
    if block >= _fresh(COUNT):
        return
    expert = _fresh(BLOCKS + block * 3).to(tl.int64)
    position, pair, is_pair = _pairs(PAIRS, BLOCKS, block, ROWS)
    n = weight_rows(tile, outputs, OUTPUTS, ACTIVATION, _RUN)
    k = tl.arange(0, STEP)
    x_row = position if ACTIVATION == NO_ACTIVATION else pair // CHOSEN
    x_at = X + x_row.to(tl.int64)[None, :] * x_stride + k[:, None]
    w_at = W + (expert * outputs + n)[:, None] * w_stride + k[None, :]
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, inputs, STEP, num_stages=STAGES):
        x = _load_x(x_at, start, k, inputs, IS_WHOLE)
        w = tl.load(w_at + start) if IS_WHOLE else tl.load(w_at + start, mask=(start + k < inputs)[None, :], other=0.0)
        sums = tl.dot(w, x, sums, input_precision="ieee")
    _finish(
        OUT, BIAS, SHARES, sums, expert, n, tile, position, pair, is_pair, out_stride, outputs, limit, alpha, WEIGHTED,
        ACTIVATION,
    )  # fmt: skip


@triton.jit
def boxes_kernel(
    X, W, BIAS, SHARES, PAIRS, BLOCKS, COUNT, OUT, x_stride, out_stride, outputs, inputs, tiles, limit, alpha,
    CHOSEN: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr, IS_WHOLE: tl.constexpr, WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `grouped_kernel`, for a described weight: a box of the gate and one of what it gates, each with its own sums.

    Boxes may reach into the next expert's rows, whose results are not stored; beyond the last input they hold zeros.
    """
    wait_if_overlapped(PDL)
    block, tile = _place(tiles, GROUP_BLOCKS)
    if block >= _fresh(COUNT):
        return
    GATED: tl.constexpr = is_gated(ACTIVATION)
    BOX: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    expert = _fresh(BLOCKS + block * 3)
    position, pair, is_pair = _pairs(PAIRS, BLOCKS, block, ROWS)
    k = tl.arange(0, STEP)
    x_row = position if ACTIVATION == NO_ACTIVATION else pair // CHOSEN
    x_at = X + x_row.to(tl.int64)[None, :] * x_stride + k[:, None]
    width = outputs // 2 if GATED else outputs
    row = expert * outputs + tile * BOX
    sums = tl.zeros([BOX, ROWS], tl.float32)
    up_sums = tl.zeros([BOX, ROWS], tl.float32)
    for start in tl.range(0, inputs, STEP, num_stages=STAGES):
        x = _load_x(x_at, start, k, inputs, IS_WHOLE)
        sums = tl.dot(W.load([row, start]), x, sums, input_precision="ieee")
        if GATED:
            up_sums = tl.dot(W.load([row + width, start]), x, up_sums, input_precision="ieee")
    m = tile * BOX + tl.arange(0, BOX)
    n = expert.to(tl.int64) * outputs + tl.minimum(m, width - 1)
    if WEIGHTED:
        share = _fresh(SHARES + pair)[None, :]
        sums *= share
        up_sums *= share
    if BIAS is not None:
        sums += tl.load(BIAS + n).to(tl.float32)[:, None]
        if GATED:
            up_sums += tl.load(BIAS + n + width).to(tl.float32)[:, None]
    y = gate_values(sums, up_sums, limit, alpha, ACTIVATION) if GATED else ungated(sums, ACTIVATION)
    _store(OUT, y, m, width, position, pair, is_pair, out_stride, ACTIVATION)


@triton.jit
def grouped_packed_kernel(
    X, U, S, Z, BIAS, SHARES, PAIRS, BLOCKS, COUNT, OUT, x_stride, u_stride, s_stride, z_stride, out_stride, outputs,
    inputs, tiles, limit, alpha, groups, CHOSEN: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, GROUP_BLOCKS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
    SCALE_OUTPUTS: tl.constexpr, IS_WHOLE: tl.constexpr, WORDS: tl.constexpr, USES_ASM: tl.constexpr,
    WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `grouped_kernel`. Scales are applied to weights, which are rounded as those of a dequantised matrix are."""
    wait_if_overlapped(PDL)
    block, tile = _place(tiles, GROUP_BLOCKS)
    if block >= _fresh(COUNT):
        return
    DTYPE: tl.constexpr = X.dtype.element_ty
    HAS_ZEROS: tl.constexpr = Z is not None
    expert = _fresh(BLOCKS + block * 3).to(tl.int64)
    position, pair, is_pair = _pairs(PAIRS, BLOCKS, block, ROWS)
    n = weight_rows(tile, outputs, OUTPUTS, ACTIVATION, _RUN)
    j = tl.arange(0, 32)
    x_row = position if ACTIVATION == NO_ACTIVATION else pair // CHOSEN
    x_at = X + x_row.to(tl.int64)[None, :] * x_stride + j[:, None]
    row = expert * outputs + n
    u_at = U + row[:, None] * u_stride + j[None, :]
    s_at = S + row // SCALE_OUTPUTS * s_stride
    z_at = Z
    if HAS_ZEROS:
        z_at = Z + row * z_stride
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in tl.range(0, tl.cdiv(inputs, 128), num_stages=STAGES):
        u = tl.load(u_at + step * 32)
        # One scale for all inputs is a group that never ends.
        scales, zeros = fetch(s_at, z_at, step, groups, GROUP or 2**30, WORDS)
        w = decode(u, zeros, DTYPE, HAS_ZEROS, GROUP, WORDS, KIND, USES_ASM)
        for span in tl.static_range(4):
            x = _load_x(x_at, step * 128 + span * 32, j, inputs, IS_WHOLE)
            scale = scale_of(scales, span, DTYPE, GROUP, WORDS, KIND)[:, None]
            if scale.dtype == DTYPE:
                scaled = w[span] * scale
            else:
                scaled = (w[span].to(tl.float32) * scale.to(tl.float32)).to(DTYPE)
            sums = tl.dot(scaled, x, sums, input_precision="ieee")
    _finish(
        OUT, BIAS, SHARES, sums, expert, n, tile, position, pair, is_pair, out_stride, outputs, limit, alpha, WEIGHTED,
        ACTIVATION,
    )  # fmt: skip


@triton.jit
def _pairs(PAIRS, BLOCKS, block, ROWS: tl.constexpr):
    """Where pairs of a block lie among those by expert, and which pairs they are. Beyond the last, the last is read."""
    at = _fresh(BLOCKS + block * 3 + 1) + tl.arange(0, ROWS)
    end = _fresh(BLOCKS + block * 3 + 2)
    position = tl.minimum(at, end - 1)
    return position, _fresh(PAIRS + position), at < end


@triton.jit
def _finish(
    OUT, BIAS, SHARES, sums, expert, n, tile, position, pair, is_pair, out_stride, outputs, limit, alpha,
    WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Weighs a tile [outputs, pairs], adds the bias, applies the activation and stores it."""
    OUTPUTS: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[1]
    if WEIGHTED:
        sums *= _fresh(SHARES + pair)[None, :]
    if BIAS is not None:
        sums += tl.load(BIAS + expert * outputs + n).to(tl.float32)[:, None]
    if is_gated(ACTIVATION):
        # [… tiles of 16, 2, 8, rows] with the 2 last, where it can be split.
        runs = tl.reshape(sums, [OUTPUTS // (2 * _RUN), 2, _RUN, ROWS])
        gate, up = tl.split(tl.permute(runs, [0, 2, 3, 1]))
        y = tl.reshape(gate_values(gate, up, limit, alpha, ACTIVATION), [OUTPUTS // 2, ROWS])
        m = tile * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        width = outputs // 2
    else:
        y = ungated(sums, ACTIVATION)
        m = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        width = outputs
    _store(OUT, y, m, width, position, pair, is_pair, out_stride, ACTIVATION)


@triton.jit
def _store(OUT, y, m, width, position, pair, is_pair, out_stride, ACTIVATION: tl.constexpr):
    """Outputs `m` of pairs: by expert for the next product, in order where they are to be added."""
    row = pair if ACTIVATION == NO_ACTIVATION else position
    to = OUT + row.to(tl.int64)[None, :] * out_stride + m[:, None]
    tl.store(to, y.to(OUT.dtype.element_ty), mask=(m < width)[:, None] & is_pair[None, :])


@triton.jit
def add_kernel(
    RESULTS, IDS, SHARES, OUT, results_stride, out_stride, outputs, first, local, CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some outputs of one row."""
    wait_if_overlapped(PDL)
    row = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHOSEN):
        pair = row * CHOSEN + i
        expert = _fresh(IDS + pair) - first
        # What other ranks' experts would have left is not there.
        inside = (m < outputs) & (expert >= 0) & (expert < local)
        result = tl.load(RESULTS + pair * results_stride + m, mask=inside, other=0.0, cache_modifier=".cg")
        if WEIGHTED:
            total += _fresh(SHARES + pair) * result.to(tl.float32)
        else:
            total += result.to(tl.float32)
    tl.store(OUT + row * out_stride + m, total.to(OUT.dtype.element_ty), mask=m < outputs)
