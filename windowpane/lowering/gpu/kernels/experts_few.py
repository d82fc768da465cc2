"""Experts of a few rows: every pair of a row and an expert reads the expert's weights by itself.

A program has a tile of outputs. Of the first product it takes one pair. Of the second it takes one row, whose experts
it goes through in order, so that nothing is left to add; quantized weights are too few bytes for that to keep the
device busy, so it takes one pair of those as well, and whichever ends last adds up what a row's pairs have left, always
in the same order. No sum depends on other rows.

What other kernels have written is read past the L1 cache: where launches overlap, it may hold what an earlier kernel
has read there. The first product lets the second begin when its programs are about to end: those of the second that
begin while most of the first still run come to lie together on the multiprocessors that are free first, and others
then have none.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.lowering.gpu.kernels.experts_activation import (
    NO_ACTIVATION,
    gate_values,
    is_gated,
    ungated,
    weight_rows,
)
from windowpane.lowering.gpu.kernels.launch import FLAGS, Operands, flags_of
from windowpane.lowering.gpu.kernels.unpacking import decode, fetch, scale_of
from windowpane.lowering.packed import PackedWeight
from windowpane.lowering.reference.routing import Routing

_LOAD_BYTES = 16


class Few(NamedTuple):
    """A program's outputs, and the warps that share its inputs. `stages`: steps of quantized weights under way."""

    outputs: int
    warps: int
    stages: int = 3


def few_product(
    x: torch.Tensor, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None, routing: Routing,
    out: torch.Tensor, *, first: int, local: int, activation: int, limit: float, alpha: float, weighted: bool,
    launch: Few, pdl: bool,
) -> None:  # fmt: skip
    """With an `activation`, out [pairs, width] of `x` [rows, inputs]; else the sums out [rows, outputs] of what each
    row's pairs have in `x` [pairs, inputs], `weighted` by their shares.
    """
    chosen = routing.ids.shape[1]
    is_first = activation != NO_ACTIVATION.value
    outputs, inputs = weight.shape[0] // local, weight.shape[1]
    tile = max(2, launch.outputs)
    tiles = triton.cdiv(outputs, tile)
    sizes = (out.stride(0), outputs, inputs)
    common = {
        "X_PAIRS": chosen if is_first else 1, "WEIGHTED": weighted, "ACTIVATION": activation, "OUTPUTS": tile,
        "PDL": pdl, "num_warps": launch.warps, "launch_pdl": pdl,
    }  # fmt: skip
    if isinstance(weight, PackedWeight):
        operands = Operands.of(weight, x.dtype)
        pairs, parts, flags = routing.ids.numel(), None, None
        if not is_first and chosen > 1:
            parts, flags = torch.empty(pairs, outputs, dtype=torch.float32, device=x.device), flags_of(x.device)
            assert tiles * len(out) <= FLAGS
        few_packed_kernel[tiles, pairs](
            x, *operands.tensors, bias, routing.ids, routing.shares, out, parts, flags, x.stride(0), *operands.strides,
            *sizes, weight.scales.shape[1], first, local, limit, alpha, CHOSEN=chosen, SPLIT=launch.warps,
            STAGES=launch.stages, **operands.fixed, **common,
        )  # fmt: skip
        return
    count = 1 if is_first else chosen
    lanes, vector = 32 * launch.warps, _LOAD_BYTES // weight.element_size()
    few_kernel[tiles, len(out)](
        x, weight, bias, routing.ids, routing.shares, out, x.stride(0), weight.stride(0), *sizes, first, local, limit,
        alpha, COUNT=count, SLOTS=triton.next_power_of_2(count), LANES=lanes, VECTOR=vector,
        IS_WHOLE=inputs % (lanes * vector) == 0, **common,
    )  # fmt: skip


@triton.jit
def _begin(ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    """Wait for the launch before; what follows the second product is one program, and may begin."""
    if PDL:
        if ACTIVATION == NO_ACTIVATION:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _pairs(IDS, SHARES, index, first, local, COUNT: tl.constexpr, SLOTS: tl.constexpr):
    """Experts of COUNT pairs, -1 where they are another rank's, and shares: all kept in registers."""
    slot = tl.arange(0, SLOTS)
    at = index * COUNT + slot
    expert = tl.load(IDS + at, mask=slot < COUNT, other=-1, cache_modifier=".cg") - first
    shares = tl.load(SHARES + at, mask=slot < COUNT, other=0.0, cache_modifier=".cg")
    return tl.where((slot < COUNT) & (expert >= 0) & (expert < local), expert, -1), shares


@triton.jit
def _of_turn(values, turn):
    """What the pair whose turn it is has. Beyond the last pair, 0."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == turn, values, 0), 0)


@triton.jit
def _load_step(W, expert, inside, n, at, w_stride, outputs, inputs, IS_WHOLE: tl.constexpr):
    """Weights of one step of one expert; zeros where it is not `inside`. No weight is read twice."""
    w_at = W + (expert.to(tl.int64) * outputs + n)[None, :, None] * w_stride + at
    if not IS_WHOLE:
        inside = inside & (at < inputs)
    return tl.load(w_at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def few_kernel(
    X, W, BIAS, IDS, SHARES, OUT, x_stride, w_stride, out_stride, outputs, inputs, first, local, limit, alpha,
    COUNT: tl.constexpr, SLOTS: tl.constexpr, X_PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_WHOLE: tl.constexpr, WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, pair or row), for COUNT experts in turn. Tiles are [LANES, OUTPUTS, VECTOR]: a thread
    has the same inputs of each output, and the next step's weights are under way while it multiplies.
    """
    _begin(ACTIVATION, PDL)
    STEP: tl.constexpr = LANES * VECTOR
    PAST_L1: tl.constexpr = ".cg" if PDL else ""
    index = tl.program_id(1)
    n = weight_rows(tl.program_id(0), outputs, OUTPUTS, ACTIVATION, 1)
    k = (tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :])[:, None, :]
    experts, shares = _pairs(IDS, SHARES, index, first, local, COUNT, SLOTS)
    turn = 0
    start = 0
    expert = _of_turn(experts, 0)
    w = _load_step(W, expert, expert >= 0, n, k, w_stride, outputs, inputs, IS_WHOLE)
    sums = tl.zeros([LANES, OUTPUTS], tl.float32)
    for _ in tl.range(0, COUNT * tl.cdiv(inputs, STEP)):
        is_last = start + STEP >= inputs
        next_start = tl.where(is_last, 0, start + STEP)
        next_turn = tl.where(is_last, turn + 1, turn)
        following = expert
        if COUNT > 1:
            following = _of_turn(experts, next_turn)
        has_next = (following >= 0) & (next_turn < COUNT)
        upcoming = _load_step(W, following, has_next, n, next_start + k, w_stride, outputs, inputs, IS_WHOLE)
        # What other ranks' experts would have left is not there.
        inside = expert >= 0
        if not IS_WHOLE:
            inside = inside & (start + k < inputs)
        x_at = X + ((index * COUNT + turn) // X_PAIRS).to(tl.int64) * x_stride + start + k
        x = tl.load(x_at, mask=inside, other=0.0, cache_modifier=PAST_L1).to(tl.float32)
        if WEIGHTED:
            x *= _of_turn(shares, turn)
        sums += tl.sum(w.to(tl.float32) * x, 2)
        w = upcoming
        start = next_start
        turn = next_turn
        expert = following
    total = tl.sum(sums, 0)
    _let_next_begin(ACTIVATION, PDL)
    if BIAS is not None:
        for turn in tl.range(0, COUNT):
            expert = _of_turn(experts, turn)
            total += _bias(BIAS, expert, _of_turn(shares, turn), n, outputs, WEIGHTED, ACTIVATION)
    _store(OUT, total, index, out_stride, outputs, limit, alpha, ACTIVATION)


@triton.jit
def few_packed_kernel(
    X, U, S, Z, BIAS, IDS, SHARES, OUT, PARTS, TAKEN, x_stride, u_stride, s_stride, z_stride, out_stride, outputs,
    inputs, groups, first, local, limit, alpha, CHOSEN: tl.constexpr, X_PAIRS: tl.constexpr, OUTPUTS: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_OUTPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr, WORDS: tl.constexpr, USES_ASM: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, pair). Tiles are [SPLIT, OUTPUTS, …]: each warp has its own blocks of inputs. The
    tensor cores multiply one row and seven of zeros, which leaves the other units to decode.

    Where a row has several pairs to add up, `PARTS` [pairs, outputs] takes what each has, and `TAKEN` counts them.
    """
    _begin(ACTIVATION, PDL)
    DTYPE: tl.constexpr = X.dtype.element_ty
    HAS_ZEROS: tl.constexpr = Z is not None
    COLUMNS: tl.constexpr = 8
    PAST_L1: tl.constexpr = ".cg" if PDL else ""
    pair = tl.program_id(1)
    blocks = tl.cdiv(inputs, 128)
    n = weight_rows(tl.program_id(0), outputs, OUTPUTS, ACTIVATION, 1)
    part = tl.arange(0, SPLIT)
    j = tl.arange(0, 32)
    is_first = (tl.arange(0, COLUMNS) == 0)[None, None, :]
    sums = tl.zeros([SPLIT, OUTPUTS, COLUMNS], tl.float32)
    expert = tl.load(IDS + pair, cache_modifier=".cg") - first
    expert = tl.where((expert >= 0) & (expert < local), expert, -1)
    row = tl.maximum(expert, 0).to(tl.int64) * outputs + n
    z_at = Z
    if HAS_ZEROS:
        z_at = Z + row[None, :] * z_stride
    x_row = X + (pair // X_PAIRS).to(tl.int64) * x_stride
    for start in tl.range(0, blocks, SPLIT, num_stages=STAGES):
        block = start + part
        inside = ((expert >= 0) & (block < blocks))[:, None, None]
        u_at = U + row[None, :, None] * u_stride + block[:, None, None] * 32 + j
        u = tl.load(u_at, mask=inside, other=0, eviction_policy="evict_first")
        # One scale for all inputs is a group that never ends. Beyond the last block the last one's are read.
        scales, zeros = fetch(
            S + (row // SCALE_OUTPUTS)[None, :] * s_stride, z_at, tl.minimum(block, blocks - 1)[:, None], groups,
            GROUP or 2**30, WORDS,
        )  # fmt: skip
        w = decode(u, zeros, DTYPE, HAS_ZEROS, GROUP, WORDS, KIND, USES_ASM)
        x_at = x_row + (block[:, None, None] * 128 + j[None, :, None] + tl.zeros([1, 1, COLUMNS], tl.int32))
        for span in tl.static_range(4):
            mask = is_first & inside
            if not IS_WHOLE:
                mask = mask & (block[:, None, None] * 128 + span * 32 + j[None, :, None] < inputs)
            x = tl.load(x_at + span * 32, mask=mask, other=0.0, cache_modifier=PAST_L1)
            products = tl.dot(w[span], x, input_precision="ieee")
            sums += products * scale_of(scales, span, DTYPE, GROUP, WORDS, KIND).to(tl.float32)[:, :, None]
    total = tl.sum(tl.sum(sums, 0), 1)
    _let_next_begin(ACTIVATION, PDL)
    share = tl.load(SHARES + pair, cache_modifier=".cg")
    if WEIGHTED:
        total *= share
    if BIAS is not None:
        total += _bias(BIAS, expert, share, n, outputs, WEIGHTED, ACTIVATION)
    if PARTS is None:
        _store(OUT, total, pair, out_stride, outputs, limit, alpha, ACTIVATION)
    else:
        index = pair // CHOSEN
        m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        is_output = m < outputs
        tl.store(PARTS + pair.to(tl.int64) * outputs + m, total, mask=is_output)
        tl.debug_barrier()
        taken = TAKEN + index * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(taken, 1, sem="acq_rel", scope="gpu") == CHOSEN - 1:
            total = tl.zeros([OUTPUTS], tl.float32)
            for turn in tl.static_range(CHOSEN):
                at = PARTS + (index * CHOSEN + turn).to(tl.int64) * outputs + m
                total += tl.load(at, mask=is_output, other=0.0, cache_modifier=".cg")
            _store(OUT, total, index, out_stride, outputs, limit, alpha, ACTIVATION)
            tl.store(taken, 0)


@triton.jit
def _let_next_begin(ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    """The second product, behind the first."""
    if PDL and ACTIVATION != NO_ACTIVATION:
        gdc_launch_dependents()


@triton.jit
def _bias(BIAS, expert, share, n, outputs, WEIGHTED: tl.constexpr, ACTIVATION: tl.constexpr):
    """Of an expert, weighted only where results are."""
    bias = tl.load(BIAS + expert.to(tl.int64) * outputs + n, mask=expert >= 0, other=0.0).to(tl.float32)
    if WEIGHTED and ACTIVATION == NO_ACTIVATION:
        bias *= share
    return bias


@triton.jit
def _store(OUT, total, index, out_stride, outputs, limit, alpha, ACTIVATION: tl.constexpr):
    """A tile of a pair or a row, behind its activation."""
    OUTPUTS: tl.constexpr = total.shape[0]
    to = OUT + index.to(tl.int64) * out_stride
    if is_gated(ACTIVATION):
        gate, up = tl.split(tl.reshape(total, [OUTPUTS // 2, 2]))
        m = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        y = gate_values(gate, up, limit, alpha, ACTIVATION)
        tl.store(to + m, y.to(OUT.dtype.element_ty), mask=m < outputs // 2)
    else:
        m = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        tl.store(to + m, ungated(total, ACTIVATION).to(OUT.dtype.element_ty), mask=m < outputs)
