"""Gated DeltaNet, one token of each sequence or a few: from the input projection to what the output projection reads.

One launch convolves, normalises, advances the state by the gated delta rule, reads it, and applies the gated norm. A
state is read once and written once; nothing else of its size moves. A sequence's drafts are rows behind its own, which
go through the state in turn, with the arithmetic of steps of their own.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.lowering.gpu.kernels.causal_convolution import convolved, remember, sigmoid, silu
from windowpane.lowering.gpu.kernels.launch import FLAGS, flags_of
from windowpane.lowering.gpu.kernels.state_places import COUNT, FIELDS, ROW, StatePart, StatePlaces
from windowpane.lowering.reference.recurrence import L2_EPS

UNIT_EPS = tl.constexpr(L2_EPS)
# More heads of rows than these keep an H200 busy with two programs each, whose registers let four run on a
# multiprocessor at once.
_FEW_PROGRAMS = 256


class DecodeLaunch(NamedTuple):
    """So many programs share the value dims of a head; the last of them to finish applies the norm.

    `registers` caps those of a thread, so that more programs run on a multiprocessor at once.
    """

    split: int
    warps: int
    registers: int | None = None


class DeltaShape(NamedTuple):
    """Heads and dims of a layer, as its weights and its state tell them."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int  # taps of the convolution

    @classmethod
    def of(cls, tails: list[StatePart], matrix: StatePart, conv: torch.Tensor, key_heads: int) -> DeltaShape:
        remembered = conv.shape[1] - 1
        shape = cls(key_heads, matrix.heads, tails[0].elements // remembered, tails[2].elements // remembered,
                    remembered + 1)  # fmt: skip
        if shape.key_dim & (shape.key_dim - 1) or shape.value_dim & (shape.value_dim - 1):
            raise ValueError(
                f"delta heads of {shape.key_dim} × {shape.value_dim} have no kernel: both must be powers of two"
            )
        return shape

    @property
    def fixed(self) -> dict[str, int]:
        """What compiles into every kernel."""
        return {"KEY_HEADS": self.key_heads, "VALUE_HEADS": self.value_heads, "K": self.key_dim, "V": self.value_dim}


def plan_decode(rows: int, shape: DeltaShape, *, several: bool = False) -> DecodeLaunch:
    """The best that `bench.gpu_checks.states sweep` found on an H200, for `decode` and `drafts`."""
    programs = rows * shape.value_heads
    if not several and _FEW_PROGRAMS < programs <= FLAGS and shape.value_dim >= 32:
        return DecodeLaunch(2, 4, 128)
    return DecodeLaunch(1, 4)


def decode_delta(
    made: torch.Tensor, places: StatePlaces, tails: list[StatePart], matrix: StatePart, conv: torch.Tensor,
    decay: torch.Tensor, dt_bias: torch.Tensor, norm_weight: torch.Tensor | None, out: torch.Tensor,
    *, key_heads: int, eps: float, launch: DecodeLaunch | None = None, pdl: bool = False,
    segments: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """out [rows, value heads × dim] of `made` [rows or more, q | k | v | z | b | a]; the states move on by a token.

    With `segments`, int32 [sequences, fields of Segment], a sequence has all rows that ask there.

    `conv` is [channels, width], `decay` is exp(A_log), both float32 like `dt_bias` and `norm_weight` (to which a norm
    that adds one has added it). Padding rows leave zeros.

    `pdl` lets the launch begin while the one before it ends, and read places, tails and states by then: between
    whoever wrote those and this there must be a plain launch.
    """
    rows, sequences, shape = len(out), len(places.starts), DeltaShape.of(tails, matrix, conv, key_heads)
    split, warps, registers = launch or plan_decode(rows, shape, several=segments is not None)
    programs = rows * shape.value_heads
    if split > 1 and programs > FLAGS:
        raise ValueError(f"{programs:,} heads of rows cannot be split: at most {FLAGS:,} can")
    partial = flags = None
    if split > 1:
        partial, flags = torch.empty(programs * shape.value_dim, device=out.device), flags_of(out.device)
    _decode_kernel[(shape.value_heads * split, sequences)](
        made, *places.arguments, segments, tails[0].arena, matrix.arena, conv, decay, dt_bias, norm_weight, out,
        partial, flags, made.stride(0), out.stride(0), *(tail.first for tail in tails), tails[0].unit, matrix.first,
        matrix.unit, eps, **shape.fixed, WIDTH=shape.width, SPLIT=split, PDL=pdl, num_warps=warps, maxnreg=registers,
        launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def softplus(x):
    """max(x, 0) + log1p(e^-|x|), the logarithm as 2 artanh(y / (2 + y)): exact to float32 also where it is tiny."""
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)
    square = z * z
    series = 1.0 / 15.0 + square * (1.0 / 17.0)
    series = 1.0 / 13.0 + square * series
    series = 1.0 / 11.0 + square * series
    series = 1.0 / 9.0 + square * series
    series = 1.0 / 7.0 + square * series
    series = 1.0 / 5.0 + square * series
    series = 1.0 / 3.0 + square * series
    return tl.maximum(x, 0.0) + 2.0 * z * (1.0 + square * series)


@triton.jit
def _past_taps(BEFORE, AFTER, CONV, channels, reads, writes, WIDTH: tl.constexpr):
    """What remembered inputs add to the convolution of `channels`; all but the oldest are remembered on.

    BEFORE and AFTER are those of each channel.
    """
    total = tl.zeros(channels.shape, tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        x = tl.load(BEFORE + tap, mask=reads, other=0.0, cache_modifier=".cg")
        total += x.to(tl.float32) * tl.load(CONV + channels * WIDTH + tap)
        if tap > 0:
            tl.store(AFTER + (tap - 1), x, mask=writes)
    return total


@triton.jit
def _present_tap(past, X, AFTER, CONV, channels, is_row, writes, WIDTH: tl.constexpr, PAST_L1: tl.constexpr):
    """SiLU of the convolution with this row's input, which is remembered as the latest."""
    x = tl.load(X + channels, mask=is_row, other=0.0, cache_modifier=PAST_L1)
    tl.store(AFTER + (WIDTH - 2), x.to(AFTER.dtype.element_ty), mask=writes)
    return silu(past + x.to(tl.float32) * tl.load(CONV + channels * WIDTH + (WIDTH - 1)))


@triton.jit
def _learn(
    state, qk, v, is_key, GATES, decay_rate, dt_bias, is_row, HEADS: tl.constexpr, K: tl.constexpr,
    PAST_L1: tl.constexpr,
):  # fmt: skip
    """The state behind a token, and what the token reads there. GATES is this head's first gate, among HEADS."""
    rate = sigmoid(tl.load(GATES, mask=is_row, other=0.0, cache_modifier=PAST_L1).to(tl.float32))
    step = tl.load(GATES + HEADS, mask=is_row, other=0.0, cache_modifier=PAST_L1).to(tl.float32)
    decay = tl.exp(-decay_rate * softplus(step + dt_bias))
    qk *= tl.rsqrt(tl.sum(qk * qk, 1) + UNIT_EPS)[:, None]
    q = tl.sum(tl.where(is_key, 0.0, qk), 0) * (K**-0.5)
    k = tl.sum(tl.where(is_key, qk, 0.0), 0)
    state = state * decay
    learned = (v - tl.sum(state * k[:, None], 0)) * rate
    o = tl.sum(state * q[:, None], 0) + tl.sum(k * q, 0) * learned
    return state + k[:, None] * learned[None, :], o


@triton.jit
def _gated_norm(o, Z, WEIGHT, dims, is_row, eps, PAST_L1: tl.constexpr):
    y = o * tl.rsqrt(tl.sum(o * o, 0) / o.shape[0] + eps)
    if WEIGHT is not None:
        y *= tl.load(WEIGHT + dims)
    return y * silu(tl.load(Z + dims, mask=is_row, other=0.0, cache_modifier=PAST_L1).to(tl.float32))


@triton.jit
def _leave(
    o, OUT, Z, NORM, PARTIAL, FLAGS_AT, index, v_dims, is_row, eps, V: tl.constexpr, SPLIT: tl.constexpr,
    PAST_L1: tl.constexpr,
):  # fmt: skip
    """Norm and gate what a head of a row has read, and store it; `index` is theirs among all that are split."""
    if SPLIT == 1:
        tl.store(OUT + v_dims, _gated_norm(o, Z, NORM, v_dims, is_row, eps, PAST_L1).to(OUT.dtype.element_ty))
    else:
        tl.store(PARTIAL + index * V + v_dims, o)
        # All threads of the program have stored before one of them says so.
        tl.debug_barrier()
        if tl.atomic_add(FLAGS_AT + index, 1, sem="acq_rel") == SPLIT - 1:
            dims = tl.arange(0, V)
            whole = tl.load(PARTIAL + index * V + dims, cache_modifier=".cg")
            tl.store(OUT + dims, _gated_norm(whole, Z, NORM, dims, is_row, eps, PAST_L1).to(OUT.dtype.element_ty))
            tl.store(FLAGS_AT + index, 0)


@triton.jit
def _decode_kernel(
    MADE, BEFORE, AFTER, STARTS, ASIDE, aside_stride, SEGMENTS, TAILS, MATRIX, CONV, DECAY, DT_BIAS, NORM, OUT, PARTIAL,
    FLAGS_AT, made_stride, out_stride, q_first, k_first, v_first, tail_unit, matrix_first, matrix_unit, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (value head and part of its value dims, sequence). The state's tile [K, V / SPLIT] stays in registers."""
    if PDL:
        gdc_launch_dependents()
    PAST_L1: tl.constexpr = ".cg" if PDL else ""
    GROUP: tl.constexpr = VALUE_HEADS // KEY_HEADS
    KEYS: tl.constexpr = KEY_HEADS * K
    BEHIND: tl.constexpr = 2 * KEYS + VALUE_HEADS * V
    head = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    sequence = tl.program_id(1).to(tl.int64)
    key_head = head // GROUP
    k_dims = tl.arange(0, K)
    v_dims = part * (V // SPLIT) + tl.arange(0, V // SPLIT)

    # The state is on its way while the projection is made.
    start = tl.load(STARTS + sequence)
    is_row = start >= 0
    has_state = start > 0
    before = tl.load(BEFORE + sequence).to(tl.int64)
    after = tl.load(AFTER + sequence).to(tl.int64)
    at = head * (K * V) + (k_dims * V).to(tl.int64)[:, None] + v_dims[None, :]
    state_at = MATRIX + before * matrix_unit + matrix_first + at
    state = tl.load(state_at, mask=has_state, other=0.0, cache_modifier=".cg")
    # Value heads of a key head all convolve its queries and keys: the first of them remembers the inputs. Both are one
    # tile, so that each thread has a few channels.
    is_key = tl.arange(0, 2)[:, None] == 1
    qk_channels = tl.where(is_key, KEYS, 0) + key_head * K + k_dims[None, :]
    qk_tails = tl.where(is_key, k_first, q_first) + (key_head * K + k_dims[None, :]) * (WIDTH - 1)
    v_channels = 2 * KEYS + head * V + v_dims
    v_tails = v_first + (head * V + v_dims) * (WIDTH - 1)
    tails_before = TAILS + before * tail_unit
    if ASIDE is not None:
        tails_before = ASIDE + sequence * aside_stride
    qk_before, v_before = tails_before + qk_tails, tails_before + v_tails
    qk_after, v_after = TAILS + after * tail_unit + qk_tails, TAILS + after * tail_unit + v_tails
    writes_keys = is_row & (head % GROUP == 0) & (part == 0)
    decay_rate = tl.load(DECAY + head)
    dt_bias = tl.load(DT_BIAS + head)
    if SEGMENTS is None:
        qk = _past_taps(qk_before, qk_after, CONV, qk_channels, has_state, writes_keys, WIDTH)
        v = _past_taps(v_before, v_after, CONV, v_channels, has_state, is_row, WIDTH)
        if PDL:
            gdc_wait()
        x = MADE + sequence * made_stride
        qk = _present_tap(qk, x, qk_after, CONV, qk_channels, is_row, writes_keys, WIDTH, PAST_L1)
        v = _present_tap(v, x, v_after, CONV, v_channels, is_row, is_row, WIDTH, PAST_L1)
        behind = x + BEHIND + head * V
        gates = x + BEHIND + VALUE_HEADS * V + head
        moved, o = _learn(
            state.to(tl.float32), qk, v, is_key, gates, decay_rate, dt_bias, is_row, VALUE_HEADS, K, PAST_L1
        )
        state_to = MATRIX + after * matrix_unit + matrix_first + at
        tl.store(state_to, moved.to(MATRIX.dtype.element_ty), mask=is_row, cache_modifier=".cs")
        to, index = OUT + sequence * out_stride + head * V, sequence * VALUE_HEADS + head
        _leave(o, to, behind, NORM, PARTIAL, FLAGS_AT, index, v_dims, is_row, eps, V, SPLIT, PAST_L1)
    else:
        first = tl.load(SEGMENTS + sequence * FIELDS + ROW).to(tl.int64)
        count = tl.load(SEGMENTS + sequence * FIELDS + COUNT)
        if PDL:
            gdc_wait()
        rows = MADE + first * made_stride
        qk_rows, v_rows = rows + qk_channels, rows + v_channels
        qk_conv, v_conv = CONV + qk_channels * WIDTH, CONV + v_channels * WIDTH
        # Between two rows it is what a step of one row would have stored.
        moved = state.to(tl.float32)
        for row in range(count):
            x = rows + row * made_stride
            qk = silu(convolved(qk_rows, made_stride, row, 1.0, qk_before, qk_conv, is_row, has_state, WIDTH))
            v = silu(convolved(v_rows, made_stride, row, 1.0, v_before, v_conv, is_row, has_state, WIDTH))
            behind = x + BEHIND + head * V
            gates = x + BEHIND + VALUE_HEADS * V + head
            moved, o = _learn(moved, qk, v, is_key, gates, decay_rate, dt_bias, is_row, VALUE_HEADS, K, PAST_L1)
            moved = moved.to(MATRIX.dtype.element_ty).to(tl.float32)
            to, index = OUT + (first + row) * out_stride + head * V, (first + row) * VALUE_HEADS + head
            _leave(o, to, behind, NORM, PARTIAL, FLAGS_AT, index, v_dims, is_row, eps, V, SPLIT, PAST_L1)
        state_to = MATRIX + after * matrix_unit + matrix_first + at
        tl.store(state_to, moved.to(MATRIX.dtype.element_ty), mask=is_row, cache_modifier=".cs")
        remember(qk_rows, made_stride, count, 1.0, qk_before, qk_after, is_row, has_state, writes_keys, WIDTH)
        remember(v_rows, made_stride, count, 1.0, v_before, v_after, is_row, has_state, is_row, WIDTH)
