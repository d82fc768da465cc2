"""Causal convolutions over all rows of sequences, channel by channel, with tails that lie in state pages.

One launch for the short convolution of LFM2, which is all of its mixer between two products, and for what chunks of
Mamba-2 convolve ahead of their scan. Kernels that take a sequence's rows in turn have it row by row (`convolved`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from windowpane.attention.triton.view import LOG2E as _LOG2E
from windowpane.lowering.gpu.kernels.launch import wait_if_overlapped
from windowpane.lowering.gpu.kernels.state_places import COUNT, FIELDS, ROW, StatePart, StatePlaces, snapshots_of

LOG2E = tl.constexpr(_LOG2E)
# Tokens and channels of a program: rows that decode have one token each.
TOKENS, CHANNELS, LONE_CHANNELS = 16, 128, 512


def short_convolution(
    made: torch.Tensor, places: StatePlaces, decoding: int, segments: torch.Tensor | None, longest: int,
    tail: StatePart, conv: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    snapshots: torch.Tensor | None = None, *, pdl: bool = False,
) -> None:  # fmt: skip
    """out [rows, channels] = C · convolution(B · x) of `made` [rows, B | C | x]; states of all sequences go on.

    The first `decoding` sequences have a row each, the others are `segments`, int32 [n, fields of Segment], the longest
    of `longest` tokens. `snapshots` are one of `snapshot_tables`, of pages that get the tails in front of positions.
    """
    tokens = TOKENS if longest > 1 else 1
    _launch(
        made, made.shape[1] // 3, places, decoding, segments, longest, tokens, [tail], conv, bias, out, 0,
        (1.0,) * 3, (0, 0), snapshots, True, pdl,
    )  # fmt: skip


def convolve_segments(
    made: torch.Tensor, first: int, places: StatePlaces, segments: torch.Tensor, longest: int, first_row: int,
    tails: Sequence[StatePart], conv: torch.Tensor, bias: torch.Tensor | None, multipliers: tuple[float, float, float],
    bounds: tuple[int, int], out: torch.Tensor, snapshots: torch.Tensor | None = None, *, pdl: bool = False,
) -> None:  # fmt: skip
    """out [rows from `first_row` on, channels] = SiLU(convolution(`made`[:, first : first + channels])).

    `places` are those of the segments alone. Channels before, between and from `bounds` on have multipliers of their
    own; the first of two `tails` has those before the first bound. `snapshots` are those of `short_convolution`.
    """
    shifted = made[:, first:]
    _launch(
        shifted, 0, places, 0, segments, longest, TOKENS, tails, conv, bias, out, first_row, multipliers, bounds,
        snapshots, False, pdl,
    )  # fmt: skip


def _launch(
    made: torch.Tensor, section: int, places: StatePlaces, decoding: int, segments: torch.Tensor | None, longest: int,
    tokens: int, tails: Sequence[StatePart], conv: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor,
    first_row: int, multipliers: tuple[float, ...], bounds: tuple[int, int], snapshots: torch.Tensor | None,
    short: bool, pdl: bool,
) -> None:  # fmt: skip
    channels, width = conv.shape
    block = min(LONE_CHANNELS if tokens == 1 else CHANNELS, triton.next_power_of_2(channels))
    sequences = len(places.starts)
    _convolution_kernel[(sequences, triton.cdiv(longest, tokens), triton.cdiv(channels, block))](
        made, *places.arguments, segments, tails[0].arena, snapshots, conv, bias, out, made.stride(0),
        out.stride(0), tails[0].first, tails[-1].first, decoding, first_row, section, *multipliers, CHANNELS=channels,
        FIRST_BOUND=bounds[0], SECOND_BOUND=bounds[1], PARTS=len(tails), UNIT=tails[0].unit, WIDTH=width, TOKENS=tokens,
        BLOCK=block, SHORT=short, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x): these are the exponent and the root that a GPU has an instruction for, also for float32."""
    root = tl.rsqrt(1.0 + tl.exp2(-LOG2E * x))
    return root * root


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def rounded(x, by, DTYPE: tl.constexpr):
    """Times a multiplier, as the activations' dtype has it; float32."""
    return (x.to(tl.float32) * by).to(DTYPE).to(tl.float32)


@triton.jit
def input_of(X, stride, at, by, BEFORE, inside, known, WIDTH: tl.constexpr):
    """What is convolved of row `at` of a sequence whose rows begin at X; those before the first are remembered in
    BEFORE. As it is remembered, since a step of one row reads it from there.
    """
    x = tl.load(X + at * stride, mask=inside & (at >= 0), other=0.0, cache_modifier=".cg")
    remembered = tl.load(BEFORE + (at + WIDTH - 1), mask=inside & known & (at < 0), other=0.0, cache_modifier=".cg")
    return tl.where(at < 0, remembered, rounded(x, by, X.dtype.element_ty).to(BEFORE.dtype.element_ty))


@triton.jit
def convolved(X, stride, at, by, BEFORE, CONV, inside, known, WIDTH: tl.constexpr):
    """The convolution of row `at` of a sequence; X, BEFORE and CONV are those of each channel."""
    total = tl.zeros(CONV.shape, tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        x = input_of(X, stride, at + tap - (WIDTH - 1), by, BEFORE, inside, known, WIDTH)
        total += x.to(tl.float32) * tl.load(CONV + tap, mask=inside, other=0.0)
    x = tl.load(X + at * stride, mask=inside, other=0.0, cache_modifier=".cg")
    return total + rounded(x, by, X.dtype.element_ty) * tl.load(CONV + (WIDTH - 1), mask=inside, other=0.0)


@triton.jit
def remember(X, stride, count, by, BEFORE, AFTER, inside, known, keeps, WIDTH: tl.constexpr):
    """In AFTER: the last inputs of a sequence of so many rows."""
    for tap in tl.static_range(WIDTH - 1):
        x = input_of(X, stride, count + tap - (WIDTH - 1), by, BEFORE, inside, known, WIDTH)
        tl.store(AFTER + tap, x, mask=inside & keeps)


@triton.jit
def _input(MADE, at, by, mask, section, SHORT: tl.constexpr):
    """What is convolved, in float32."""
    DTYPE: tl.constexpr = MADE.dtype.element_ty
    x = tl.load(MADE + at, mask=mask, other=0.0)
    if SHORT:
        by = tl.load(MADE + at + 2 * section, mask=mask, other=0.0).to(tl.float32)
    return rounded(x, by, DTYPE)


@triton.jit
def _leave_tail(
    MADE, made_stride, row, c, by, OLD, NEW, count, inside, known, section, WIDTH: tl.constexpr, SHORT: tl.constexpr
):
    """In NEW: the last inputs in front of row `count` of a sequence whose first is `row`."""
    KEPT: tl.constexpr = WIDTH - 1
    for tap in tl.static_range(KEPT):
        from_end = count + tap - KEPT
        here = inside & (from_end >= 0)
        value = _input(MADE, (row + from_end) * made_stride + c, by, here, section, SHORT)
        value += tl.load(OLD + from_end + KEPT, mask=inside & (from_end < 0) & known, other=0.0).to(tl.float32)
        tl.store(NEW + tap, value.to(NEW.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["decoding", "first_row"],
    do_not_specialize_on_alignment=["BEFORE", "AFTER", "STARTS", "ASIDE", "SEGMENTS", "SNAPSHOTS"],
)
def _convolution_kernel(
    MADE, BEFORE, AFTER, STARTS, ASIDE, aside_stride, SEGMENTS, TAILS, SNAPSHOTS, CONV, BIAS, OUT,
    made_stride, out_stride, first, second, decoding, first_row, section, by_0, by_1, by_2, CHANNELS: tl.constexpr,
    FIRST_BOUND: tl.constexpr, SECOND_BOUND: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence, tile of tokens, block of channels). The first tile also leaves the sequence's new tails."""
    wait_if_overlapped(PDL)
    KEPT: tl.constexpr = WIDTH - 1
    sequence, tile = tl.program_id(0), tl.program_id(1)
    start = tl.load(STARTS + sequence)
    row = sequence.to(tl.int64)
    count = 1
    if SEGMENTS is not None:  # noqa: SIM102 - compiled away where there are none
        if sequence >= decoding:
            segment = SEGMENTS + (sequence - decoding) * FIELDS
            row = tl.load(segment + ROW).to(tl.int64)
            count = tl.load(segment + COUNT)
    t = tile * TOKENS + tl.arange(0, TOKENS)
    if tile * TOKENS < count:
        c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = c < CHANNELS
        by = tl.where(c < FIRST_BOUND, by_0, tl.where(c < SECOND_BOUND, by_1, by_2))
        place = first + c * KEPT
        if PARTS == 2:
            place = tl.where(c < FIRST_BOUND, place, second + (c - FIRST_BOUND) * KEPT)
        old = TAILS + tl.load(BEFORE + sequence).to(tl.int64) * UNIT + place
        if ASIDE is not None:
            old = ASIDE + sequence.to(tl.int64) * aside_stride + place
        new = TAILS + tl.load(AFTER + sequence).to(tl.int64) * UNIT + place
        total = tl.zeros([TOKENS, BLOCK], tl.float32)
        for tap in tl.static_range(WIDTH):
            weight = tl.load(CONV + c * WIDTH + tap, mask=inside, other=0.0)
            token = (t + (tap - KEPT))[:, None]
            here = inside[None, :] & (token >= 0) & (token < count)
            x = _input(MADE, (row + token) * made_stride + c[None, :], by[None, :], here, section, SHORT)
            before = inside[None, :] & (token < 0) & (start > 0)
            x += tl.load(old[None, :] + (token + KEPT), mask=before, other=0.0).to(tl.float32)
            total += x * weight[None, :]
        if BIAS is not None:
            total += tl.load(BIAS + c, mask=inside, other=0.0)[None, :]
        at = (row + t)[:, None]
        kept = inside[None, :] & (t < count)[:, None]
        if SHORT:
            behind = tl.load(MADE + at * made_stride + section + c[None, :], mask=kept, other=0.0).to(tl.float32)
            total = tl.where(start >= 0, total * behind, 0.0)
        else:
            total = silu(total)
        tl.store(OUT + (at - first_row) * out_stride + c[None, :], total.to(OUT.dtype.element_ty), mask=kept)
        if tile == 0 and start >= 0:
            _leave_tail(MADE, made_stride, row, c, by, old, new, count, inside, start > 0, section, WIDTH, SHORT)
            if SNAPSHOTS is not None:  # noqa: SIM102 - compiled away where there are none
                if sequence >= decoding:
                    mine, others = snapshots_of(SNAPSHOTS, sequence - decoding)
                    for snapshot in range(mine, others, 2):
                        until = tl.load(SNAPSHOTS + snapshot) - start
                        kept_in = TAILS + tl.load(SNAPSHOTS + snapshot + 1).to(tl.int64) * UNIT + place
                        _leave_tail(
                            MADE, made_stride, row, c, by, old, kept_in, until, inside, start > 0, section, WIDTH, SHORT
                        )  # fmt: skip
