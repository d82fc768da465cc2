"""Gated DeltaNet over segments: the chunked (WY) form of the gated delta rule.

Chunks of 64 tokens begin with their segment, so no result depends on other segments. Four launches do a strip of
chunks: convolution and norms of q, k and v; what each chunk can find out without the state, all chunks at once; the
states from chunk to chunk with the outputs; the gated norm. A strip is as long as the workspace allows, and the state
of a segment that goes on in the next strip waits in the workspace in float32.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from windowpane.attention.segments import ChunkQueries
from windowpane.kv.delta_workspace import CHUNK_TOKENS, STRIP_TOKENS, piece_bytes, workspace_pieces
from windowpane.kv.delta_workspace import delta_workspace_bytes as workspace_bytes
from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels.causal_convolution import LOG2E, sigmoid, silu
from windowpane.lowering.gpu.kernels.delta import UNIT_EPS, DeltaShape, softplus
from windowpane.lowering.gpu.kernels.launch import wait_if_overlapped
from windowpane.lowering.gpu.kernels.state_places import FIELDS, StatePart, StatePlaces, snapshots_of
from windowpane.schedule.step import Segment

CHUNK = tl.constexpr(CHUNK_TOKENS)
BLOCK = tl.constexpr(16)  # rows that are solved one after another
ROWS = tl.constexpr(8)  # tokens that are convolved at a time
_FEWEST_SLOTS = 16
_NORM_TOKENS = 32


class ChunkLaunch(NamedTuple):
    """Warps of each launch. A program convolves so many tokens of at most so many channels; one of the pass over the
    states has `values` value dims of a head.
    """

    convolve_warps: int = 2
    convolve_tokens: int = 32
    convolve_channels: int = 256
    solve_warps: int = 4
    solve_stages: int = 1
    values: int = 64
    pass_warps: int = 4
    pass_stages: int = 3


# In float32 a stage of the pass over the states takes 120 KiB of shared memory.
LAUNCH = ChunkLaunch()
WIDE_LAUNCH = ChunkLaunch(convolve_warps=8, solve_warps=8, pass_warps=8, pass_stages=1)


def launch_for(shape: DeltaShape, dtype: torch.dtype) -> ChunkLaunch:
    if dtype == torch.float32:
        return WIDE_LAUNCH
    # With heads of 16 or 32 dims, which only models for tests have, Triton 3.6 compiles products of 4 warps wrongly.
    return LAUNCH._replace(solve_warps=2) if min(shape.key_dim, shape.value_dim) < 64 else LAUNCH


def delta_workspace_bytes(shape: DeltaShape, dtype: torch.dtype, tokens: int = STRIP_TOKENS) -> int:
    """What strips of so many tokens take; that of one chunk is the least."""
    return workspace_bytes(shape, dtype.itemsize, tokens)


class _Workspace(NamedTuple):
    carried: torch.Tensor
    totals: torch.Tensor
    pairs: torch.Tensor
    values: torch.Tensor
    known: torch.Tensor
    inside: torch.Tensor

    @classmethod
    def within(cls, given: torch.Tensor, shape: DeltaShape, dtype: torch.dtype) -> tuple[_Workspace, int]:
        """As many chunks as fit into `given`, a flat tensor of bytes."""
        least, two = (delta_workspace_bytes(shape, dtype, n * CHUNK_TOKENS) for n in (1, 2))
        if given.numel() < least:
            raise ValueError(f"a workspace of {given.numel():,} bytes is too small for a chunk: give {least:,} or more")
        chunks = 1 + (given.numel() - least) // (two - least)
        found, at = [], 0
        for name, (size, element_bytes) in workspace_pieces(shape, dtype.itemsize, chunks).items():
            kind = torch.float32 if name in ("carried", "totals") else dtype
            found.append(given[at : at + prod(size) * element_bytes].view(kind))
            at += piece_bytes(size, element_bytes)
        return cls(*found), chunks


class _Strip(NamedTuple):
    """Chunks [first, last) of all segments' chunks, of segments [begin, end), in so many rows."""

    first: int
    last: int
    begin: int
    end: int
    row: int
    rows: int


def _strips(segments: Sequence[Segment], chunks: int) -> Iterator[_Strip]:
    counts = [ceil_div(s.stop - s.start, CHUNK_TOKENS) for s in segments]
    ends = [0, *accumulate(counts)]

    def row_of(chunk: int) -> int:
        index = min(bisect_right(ends, chunk) - 1, len(segments) - 1)
        segment = segments[index]
        return segment.row + min((chunk - ends[index]) * CHUNK_TOKENS, segment.stop - segment.start)

    for first in range(0, ends[-1], chunks):
        last = min(first + chunks, ends[-1])
        row = row_of(first)
        yield _Strip(first, last, bisect_right(ends, first) - 1, bisect_left(ends, last), row, row_of(last) - row)


def _heads_together(heads: int, dim: int, channels: int) -> int:
    """How many heads of at most so many channels a program convolves: a power of two that divides them."""
    return min(heads & -heads, max(1, channels // dim))


def chunk_delta(
    made: torch.Tensor, places: StatePlaces, segments: ChunkQueries, tails: list[StatePart], matrix: StatePart,
    conv: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor, norm_weight: torch.Tensor | None,
    out: torch.Tensor, workspace: torch.Tensor, *, key_heads: int, eps: float, snapshots: torch.Tensor | None = None,
    launch: ChunkLaunch | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """The rows of all segments in out [rows, value heads × dim], of `made` [rows, q | k | v | z | b | a].

    `places` are those of the step: its last ones belong to the segments. Weights are those of `decode_delta`.
    `workspace` is a flat tensor of bytes (`delta_workspace_bytes`). `snapshots` are one of `snapshot_tables`, of pages
    that get the states in front of positions within segments or at their end.
    """
    if not segments.host_segments:
        return
    shape = DeltaShape.of(tails, matrix, conv, key_heads)
    launch = launch or launch_for(shape, made.dtype)
    room, chunks = _Workspace.within(workspace, shape, made.dtype)
    heads, count = shape.value_heads, len(segments.host_segments)
    values = min(launch.values, shape.value_dim)
    table, first_sequence = segments.segments, len(places.before) - count
    slots = max(_FEWEST_SLOTS, triton.next_power_of_2(count))
    sizes = (key_heads, shape.key_dim), (heads, shape.value_dim)
    keys, together = (_heads_together(*size, launch.convolve_channels) for size in sizes)
    fixed = {**shape.fixed, "SLOTS": slots}
    precision = {"PRECISION": "tf32x3" if made.dtype == torch.float32 else "tf32"}
    for turn, strip in enumerate(_strips(segments.host_segments, chunks)):
        many = strip.last - strip.first
        # A plain launch: its cached reads see what was written before.
        convolve_kernel[(many * (CHUNK_TOKENS // launch.convolve_tokens), 2 * key_heads // keys + heads // together)](
            made, table, *places.arguments, tails[0].arena, conv, snapshots, room.pairs, room.values,
            made.stride(0), *(tail.first for tail in tails), tails[0].unit, count, first_sequence, strip.first,
            chunks * CHUNK_TOKENS,
            **fixed, WIDTH=shape.width, KEYS=keys, HEADS=together, TOKENS=launch.convolve_tokens,
            num_warps=launch.convolve_warps,
        )  # fmt: skip
        solve_kernel[(many, heads)](
            made, table, room.pairs, room.values, room.known, room.inside, room.totals, decay, dt_bias,
            made.stride(0), count, strip.first, chunks * CHUNK_TOKENS, **fixed, **precision, PDL=pdl,
            num_warps=launch.solve_warps, num_stages=launch.solve_stages, launch_pdl=pdl,
        )  # fmt: skip
        pass_kernel[(shape.value_dim // values, heads, strip.end - strip.begin)](
            table, *places[:3], matrix.arena, snapshots, room.pairs, room.values, room.known, room.inside,
            room.totals, room.carried, out, out.stride(0), matrix.first, matrix.unit, count, first_sequence,
            strip.begin, strip.first, strip.last, turn % 2, chunks * CHUNK_TOKENS, **fixed, **precision,
            VALUES=values, STAGES=launch.pass_stages, PDL=pdl, num_warps=launch.pass_warps, launch_pdl=pdl,
        )  # fmt: skip
        gated_norm_kernel[(ceil_div(strip.rows, _NORM_TOKENS), heads)](
            out, made, norm_weight, out.stride(0), made.stride(0), strip.row, strip.rows, eps, **shape.fixed,
            TOKENS=_NORM_TOKENS, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip


@triton.jit
def _chunks_of(SEGMENTS, count, SLOTS: tl.constexpr):
    """How many chunks each segment has."""
    slot = tl.arange(0, SLOTS)
    start = tl.load(SEGMENTS + slot * FIELDS + 1, mask=slot < count, other=0)
    stop = tl.load(SEGMENTS + slot * FIELDS + 2, mask=slot < count, other=0)
    return (stop - start + (CHUNK - 1)) // CHUNK


@triton.jit
def _segment_of(SEGMENTS, count, chunk, SLOTS: tl.constexpr):
    """The segment of a chunk, and the first of its tokens that the chunk has."""
    chunks = _chunks_of(SEGMENTS, count, SLOTS)
    segment = tl.sum((tl.cumsum(chunks, 0) <= chunk).to(tl.int32), 0)
    begin = tl.sum(tl.where(tl.arange(0, SLOTS) < segment, chunks, 0), 0)
    return segment, (chunk - begin) * CHUNK


@triton.jit
def _rows_of(SEGMENTS, segment):
    """Position of a segment's first token, its tokens, and its first row."""
    start = tl.load(SEGMENTS + segment * FIELDS + 1)
    stop = tl.load(SEGMENTS + segment * FIELDS + 2)
    return start, stop - start, tl.load(SEGMENTS + segment * FIELDS + 3).to(tl.int64)


# -- convolution ---------------------------------------------------------------------------------------------------


@triton.jit
def _store_tail(X, stride, BEFORE, TO, dims, behind, has_past, WIDTH: tl.constexpr):
    """Remember the last inputs in front of token `behind` of a segment; X is its first row."""
    for tap in tl.static_range(WIDTH - 1):
        at = behind - (WIDTH - 1) + tap
        x = tl.load(X + at.to(tl.int64) * stride + dims, mask=at >= 0, other=0.0)
        old = tl.load(BEFORE + dims * (WIDTH - 1) + (behind + tap), mask=(at < 0) & has_past, other=0.0)
        tl.store(TO + dims * (WIDTH - 1) + tap, tl.where(at >= 0, x.to(TO.dtype.element_ty), old))


@triton.jit
def _convolve(
    X, stride, TAIL, CONV, TO, first, tokens, has_past, scale, HEADS: tl.constexpr, DIM: tl.constexpr,
    IS_UNIT: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store SiLU of the convolution of some heads' TOKENS from `first` on; IS_UNIT: of unit length times `scale`, and
    zeros behind the last token, where others have anything.

    A thread has ROWS tokens of its channels at a time: an input is read once and stays in registers for all taps.
    """
    head = tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    channel = head * DIM + dim
    taps = ()
    for tap in tl.static_range(WIDTH):
        taps = taps + (tl.load(CONV + channel * WIDTH + tap),)  # noqa: RUF005 - Triton adds tuples, it does not unpack
    for block in range(TOKENS // ROWS):
        start = first + block * ROWS
        x = ()
        for i in tl.static_range(WIDTH - 1):
            at = start + (i - (WIDTH - 1))
            if at >= 0:
                here = tl.load(X + tl.minimum(at, tokens - 1).to(tl.int64) * stride + channel).to(tl.float32)
            else:
                here = tl.load(TAIL + channel * (WIDTH - 1) + i, mask=has_past, other=0.0).to(tl.float32)
            x = x + (here,)  # noqa: RUF005
        for i in tl.static_range(ROWS):
            at = tl.minimum(start + i, tokens - 1).to(tl.int64)
            x = x + (tl.load(X + at * stride + channel).to(tl.float32),)  # noqa: RUF005
        for i in tl.static_range(ROWS):
            y = x[i] * taps[0]
            for tap in tl.static_range(1, WIDTH):
                y += x[i + tap] * taps[tap]
            y = silu(y)
            if IS_UNIT:
                length = tl.rsqrt(tl.sum(y * y, 1) + UNIT_EPS)
                y *= (length * tl.where(start + i < tokens, scale, 0.0))[:, None]
            to = TO + (block * ROWS + i) * DIM + head * (CHUNK * DIM) + dim
            tl.store(to, y.to(TO.dtype.element_ty))


@triton.jit(
    do_not_specialize=["count", "first_sequence", "first_chunk"],
    do_not_specialize_on_alignment=["SNAPSHOTS"],
)
def convolve_kernel(
    MADE, SEGMENTS, BEFORE, AFTER, STARTS, ASIDE, aside_stride, TAILS, CONV, SNAPSHOTS, PAIRS, VALUES,
    made_stride, q_first, k_first, v_first, tail_unit, count, first_sequence, first_chunk, strip_tokens,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SLOTS: tl.constexpr,
    WIDTH: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (TOKENS of them, KEYS heads of q or k, or HEADS of v). Who has a segment's last tokens remembers them."""
    BLOCKS: tl.constexpr = CHUNK // TOKENS
    KEY_PARTS: tl.constexpr = KEY_HEADS // KEYS
    index = tl.program_id(0) // BLOCKS
    part = tl.program_id(1)
    segment, first = _segment_of(SEGMENTS, count, first_chunk + index, SLOTS)
    start, tokens, row = _rows_of(SEGMENTS, segment)
    within = tl.program_id(0) % BLOCKS * TOKENS
    first += within
    sequence = first_sequence + segment
    has_past = tl.load(STARTS + sequence) > 0
    before = TAILS + tl.load(BEFORE + sequence).to(tl.int64) * tail_unit
    if ASIDE is not None:
        before = ASIDE + sequence.to(tl.int64) * aside_stride
    next_page = tl.load(AFTER + sequence).to(tl.int64) * tail_unit
    to_row = index.to(tl.int64) * CHUNK
    if part < 2 * KEY_PARTS:
        is_key = part >= KEY_PARTS
        head = part % KEY_PARTS * KEYS
        channel = tl.where(is_key, KEY_HEADS * K, 0) + head * K
        tail = tl.where(is_key, k_first, q_first) + head * (K * (WIDTH - 1))
        x = MADE + row * made_stride + channel
        to = PAIRS + (tl.where(is_key, strip_tokens, 0) + to_row) * (KEY_HEADS * K) + (head * CHUNK + within) * K
        _convolve(x, made_stride, before + tail, CONV + channel * WIDTH, to, first, tokens, has_past,
                  tl.where(is_key, 1.0, K**-0.5), KEYS, K, True, WIDTH, TOKENS)  # fmt: skip
        _remember(x, made_stride, before + tail, TAILS + tail, next_page, first, start, tokens, has_past, segment,
                  SNAPSHOTS, tail_unit, KEYS * K, WIDTH, TOKENS)  # fmt: skip
    else:
        head = (part - 2 * KEY_PARTS) * HEADS
        channel = 2 * KEY_HEADS * K + head * V
        tail = v_first + head * (V * (WIDTH - 1))
        x = MADE + row * made_stride + channel
        to = VALUES + to_row * (VALUE_HEADS * V) + (head * CHUNK + within) * V
        _convolve(x, made_stride, before + tail, CONV + channel * WIDTH, to, first, tokens, has_past, 1.0,
                  HEADS, V, False, WIDTH, TOKENS)  # fmt: skip
        _remember(x, made_stride, before + tail, TAILS + tail, next_page, first, start, tokens, has_past, segment,
                  SNAPSHOTS, tail_unit, HEADS * V, WIDTH, TOKENS)  # fmt: skip


@triton.jit
def _remember(
    X, stride, BEFORE, TAIL, next_page, first, start, tokens, has_past, segment, SNAPSHOTS, unit,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store the tails whose last input is one of TOKENS from `first` on: of the segment's end, and of snapshots."""
    channels = tl.arange(0, CHANNELS)
    last = tl.minimum(first + TOKENS, tokens)
    if first < tokens and last == tokens:
        _store_tail(X, stride, BEFORE, TAIL + next_page, channels, tokens, has_past, WIDTH)
    if SNAPSHOTS is not None:
        mine, others = snapshots_of(SNAPSHOTS, segment)
        for snapshot in range(mine, others, 2):
            behind = tl.load(SNAPSHOTS + snapshot) - start
            if behind > first and behind <= last:
                to = tl.load(SNAPSHOTS + snapshot + 1).to(tl.int64) * unit
                _store_tail(X, stride, BEFORE, TAIL + to, channels, behind, has_past, WIDTH)


# -- within chunks -------------------------------------------------------------------------------------------------


@triton.jit
def _joined(solved, system, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of twice the size from those of neighbours: −T₂ A₂₁ T₁ joins T₁ and T₂."""
    i = tl.arange(0, CHUNK)[:, None] // SIZE
    j = tl.arange(0, CHUNK)[None, :] // SIZE
    below = tl.where((i // 2 == j // 2) & (i > j), system, 0.0)
    below = tl.dot(solved, below, input_precision=PRECISION)
    return solved - tl.dot(below, solved, input_precision=PRECISION)


@triton.jit
def _inverse(products, system, total, rate, PRECISION: tl.constexpr):
    """(I + A)⁻¹ of A = tril(`system`, -1) = tril(rate · products · decay between tokens, -1), products symmetric.

    Diagonal blocks are solved row by row, all at once, and then joined.
    """
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    block = tl.arange(0, BLOCKS)
    is_diagonal = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(is_diagonal, tl.reshape(products, [BLOCKS, BLOCK, BLOCKS, BLOCK]), 0.0), 2)
    # Aᵀ, whose columns are extracted in the layout that rows of T are summed in.
    totals, rates = tl.reshape(total, [BLOCKS, BLOCK]), tl.reshape(rate, [BLOCKS, BLOCK])
    r = tl.arange(0, BLOCK)[None, :, None]
    c = tl.arange(0, BLOCK)[None, None, :]
    decays = tl.exp2(tl.where(r < c, totals[:, None, :] - totals[:, :, None], float("-inf")))
    flipped = diagonal * decays * rates[:, None, :]
    solved = tl.where(r == c, 1.0, 0.0) + tl.zeros([BLOCKS, BLOCK, BLOCK], tl.float32)
    for row in range(1, BLOCK):
        factors = tl.sum(tl.where(c == row, flipped, 0.0), 2)
        change = tl.sum(factors[:, :, None] * solved, 1)
        solved = tl.where(r == row, solved - change[:, None, :], solved)
    solved = tl.where(is_diagonal, solved[:, :, None, :], 0.0)
    solved = tl.reshape(solved, [CHUNK, CHUNK])
    solved = _joined(solved, system, BLOCK, PRECISION)
    return _joined(solved, system, 2 * BLOCK, PRECISION)


@triton.jit(do_not_specialize=["count", "first_chunk"])
def solve_kernel(
    MADE, SEGMENTS, PAIRS, VALUES, KNOWN, INSIDE, TOTALS, DECAY, DT_BIAS,
    made_stride, count, first_chunk, strip_tokens,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SLOTS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (chunk, value head): what the tokens learn from an empty state, which takes the values' place dim by dim,
    what they know of a state, by which they learn less, and how much of what is learned each query reads.
    """
    wait_if_overlapped(PDL)
    PAST_L1: tl.constexpr = ".cg" if PDL else ""
    DTYPE: tl.constexpr = PAIRS.dtype.element_ty
    index = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    i = tl.arange(0, CHUNK)
    block = index.to(tl.int64) * VALUE_HEADS + head
    key_at = i[:, None] * K + tl.arange(0, K)[None, :]
    pairs = PAIRS + (index.to(tl.int64) * KEY_HEADS + key_head) * (CHUNK * K) + key_at
    k = tl.load(pairs + strip_tokens * (KEY_HEADS * K), cache_modifier=PAST_L1)
    q = tl.load(pairs, cache_modifier=PAST_L1)
    segment, first = _segment_of(SEGMENTS, count, first_chunk + index, SLOTS)
    _, tokens, row = _rows_of(SEGMENTS, segment)
    is_token = first + i < tokens
    gates = MADE + (row + first + i) * made_stride + (2 * KEY_HEADS * K + 2 * VALUE_HEADS * V + head)
    rate = sigmoid(tl.load(gates, mask=is_token, other=0.0, cache_modifier=PAST_L1).to(tl.float32))
    step = tl.load(gates + VALUE_HEADS, mask=is_token, other=0.0, cache_modifier=PAST_L1).to(tl.float32)
    log_decay = (-LOG2E * tl.load(DECAY + head)) * softplus(step + tl.load(DT_BIAS + head))
    total = tl.cumsum(tl.where(is_token, log_decay, 0.0), 0)
    tl.store(TOTALS + head * strip_tokens + index * CHUNK + i, total)

    transposed = tl.trans(k)
    decays = tl.exp2(tl.where(i[:, None] >= i[None, :], total[:, None] - total[None, :], float("-inf")))
    inside = tl.dot(q, transposed, input_precision=PRECISION) * decays
    tl.store(INSIDE + block * (CHUNK * CHUNK) + i[:, None] * CHUNK + i[None, :], inside.to(DTYPE))

    products = tl.dot(k, transposed, input_precision=PRECISION)
    solved = _inverse(products, products * decays * rate[:, None], total, rate, PRECISION) * rate[None, :]
    values = VALUES + block * (CHUNK * V)
    v = tl.load(values + i[:, None] * V + tl.arange(0, V)[None, :], cache_modifier=PAST_L1)
    learned = tl.dot(solved.to(DTYPE), v, input_precision=PRECISION).to(DTYPE)
    # In another order than `v` was read in: every warp has by now waited for all of it, which the product needs.
    tl.store(values + tl.arange(0, V)[:, None] * CHUNK + i[None, :], tl.trans(learned))
    solved *= tl.exp2(total)[None, :]
    known = tl.dot(solved.to(DTYPE), k, input_precision=PRECISION)
    tl.store(KNOWN + block * (CHUNK * K) + key_at, known.to(DTYPE))


# -- from chunk to chunk -------------------------------------------------------------------------------------------


@triton.jit
def _learned(state, LEARNED, KNOWN, block, v_dims, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
             PAST_L1: tl.constexpr):  # fmt: skip
    """What the tokens of a chunk learn [VALUES, CHUNK], given the state in front of it; `block`: its chunk and head."""
    i = tl.arange(0, CHUNK).to(tl.int64)
    known = tl.load(KNOWN + block * (CHUNK * K) + (i[:, None] * K + tl.arange(0, K)[None, :]), cache_modifier=PAST_L1)
    fresh_at = v_dims.to(tl.int64)[:, None] * CHUNK + i[None, :]
    fresh = tl.load(LEARNED + block * (CHUNK * V) + fresh_at, cache_modifier=PAST_L1)
    return fresh.to(tl.float32) - tl.dot(state.to(known.dtype), tl.trans(known), input_precision=PRECISION)


@triton.jit
def _through(
    state, chunk, stop, PAIRS, LEARNED, KNOWN, INSIDE, TOTALS, OUT, out_stride, strip_tokens, tokens, first_token,
    v_dims, head, key_head,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PAST_L1: tl.constexpr,
):  # fmt: skip
    """The state [VALUES, K] behind chunks [chunk, stop) of the strip, whose outputs are stored.

    `first_token` is the number that the strip's first token has in this segment, and OUT is where its output would go:
    both may lie in front of the segment. Value dims are rows, so that what one product gives is the first operand of
    the next as it lies in registers.
    """
    DTYPE: tl.constexpr = PAIRS.dtype.element_ty
    i = tl.arange(0, CHUNK)
    rows = i.to(tl.int64)[:, None]
    key_at = rows * K + tl.arange(0, K)[None, :]
    for index in tl.range(chunk, stop, num_stages=STAGES):
        block = (head + index * VALUE_HEADS).to(tl.int64)
        key_block = (key_head + index * KEY_HEADS).to(tl.int64) * (CHUNK * K)
        learned = _learned(state, LEARNED, KNOWN, block, v_dims, K, V, PRECISION, PAST_L1)
        q = tl.load(PAIRS + key_block + key_at, cache_modifier=PAST_L1)
        inside = tl.load(INSIDE + block * (CHUNK * CHUNK) + (rows * CHUNK + i[None, :]), cache_modifier=PAST_L1)
        k = tl.load(PAIRS + (key_block + strip_tokens * (KEY_HEADS * K)) + key_at, cache_modifier=PAST_L1)
        totals = TOTALS + head * strip_tokens + index * CHUNK
        total = tl.load(totals + i, cache_modifier=PAST_L1)
        last = tl.load(totals + (CHUNK - 1), cache_modifier=PAST_L1)
        o = tl.dot(state.to(DTYPE), tl.trans(q), input_precision=PRECISION) * tl.exp2(total)[None, :]
        o = tl.dot(learned.to(DTYPE), tl.trans(inside), o, input_precision=PRECISION)
        at = (i + index * CHUNK).to(tl.int64)
        mask = (first_token + at < tokens)[:, None]
        tl.store(OUT + at[:, None] * out_stride + v_dims[None, :], tl.trans(o.to(OUT.dtype.element_ty)), mask=mask)
        kept = (learned * tl.exp2(last - total)[None, :]).to(DTYPE)
        state = tl.dot(kept, k, state * tl.exp2(last), input_precision=PRECISION)
    return state


@triton.jit
def _within(
    state, chunk, behind, PAIRS, LEARNED, KNOWN, TOTALS, strip_tokens, v_dims, head, key_head,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
    PAST_L1: tl.constexpr,
):  # fmt: skip
    """The state behind the first `behind` tokens of a chunk: what these learn does not depend on later ones."""
    i = tl.arange(0, CHUNK)
    block = (head + chunk * VALUE_HEADS).to(tl.int64)
    learned = _learned(state, LEARNED, KNOWN, block, v_dims, K, V, PRECISION, PAST_L1)
    keys = PAIRS + strip_tokens * (KEY_HEADS * K) + (key_head + chunk * KEY_HEADS).to(tl.int64) * (CHUNK * K)
    k = tl.load(keys + i[:, None] * K + tl.arange(0, K)[None, :], cache_modifier=PAST_L1)
    total = tl.load(TOTALS + head * strip_tokens + chunk * CHUNK + i, cache_modifier=PAST_L1)
    until = tl.sum(tl.where(i == behind - 1, total, 0.0), 0)
    decays = tl.exp2(tl.where(i < behind, until - total, float("-inf")))
    kept = (learned * decays[None, :]).to(k.dtype)
    return tl.dot(kept, k, state * tl.exp2(until), input_precision=PRECISION)


@triton.jit(
    do_not_specialize=["count", "first_sequence", "begin", "first_chunk", "last_chunk", "turn"],
    do_not_specialize_on_alignment=["SNAPSHOTS"],
)
def pass_kernel(
    SEGMENTS, BEFORE, AFTER, STARTS, MATRIX, SNAPSHOTS, PAIRS, LEARNED, KNOWN, INSIDE, TOTALS, CARRIED, OUT,
    out_stride, matrix_first, matrix_unit, count, first_sequence, begin, first_chunk, last_chunk, turn, strip_tokens,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SLOTS: tl.constexpr,
    PRECISION: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (part of the value dims, value head, segment): the state [VALUES, K] through the chunks of a strip."""
    wait_if_overlapped(PDL)
    PAST_L1: tl.constexpr = ".cg" if PDL else ""
    part = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    segment = begin + tl.program_id(2)
    chunks = _chunks_of(SEGMENTS, count, SLOTS)
    slot = tl.arange(0, SLOTS)
    segment_begin = tl.sum(tl.where(slot < segment, chunks, 0), 0)
    segment_end = segment_begin + tl.sum(tl.where(slot == segment, chunks, 0), 0)
    start, tokens, row = _rows_of(SEGMENTS, segment)
    sequence = first_sequence + segment

    v_dims = part * VALUES + tl.arange(0, VALUES)
    element = head * (K * V) + tl.arange(0, K)[None, :] * V + v_dims[:, None]
    is_begun = segment_begin < first_chunk
    page = MATRIX + tl.load(BEFORE + sequence).to(tl.int64) * matrix_unit + matrix_first
    has_state = (tl.load(STARTS + sequence) > 0) & (is_begun == 0)
    state = tl.load(page + element, mask=has_state, other=0.0, cache_modifier=".cg").to(tl.float32)
    carried = CARRIED + turn * (VALUE_HEADS * K * V) + element
    state += tl.load(carried, mask=is_begun, other=0.0, cache_modifier=".cg")

    # From here on chunks are those of the strip.
    chunk = tl.maximum(segment_begin - first_chunk, 0)
    end = tl.minimum(segment_end, last_chunk) - first_chunk
    first_token = (first_chunk - segment_begin) * CHUNK
    out = OUT + (row + first_token) * out_stride + head * V
    if SNAPSHOTS is None:
        state = _through(state, chunk, end, PAIRS, LEARNED, KNOWN, INSIDE, TOTALS, out, out_stride, strip_tokens,
                         tokens, first_token, v_dims, head, key_head, KEY_HEADS, VALUE_HEADS, K, V, PRECISION, STAGES,
                         PAST_L1)  # fmt: skip
    else:
        mine, others = snapshots_of(SNAPSHOTS, segment)
        for snapshot in range(mine, others + 2, 2):  # as far as each of them, and in the end as far as there is
            is_one = snapshot < others
            behind = tl.load(SNAPSHOTS + snapshot, mask=is_one, other=0) - start - first_token
            there = (behind - 1) // CHUNK
            is_here = is_one & (behind > chunk * CHUNK) & (there < end)
            stop = tl.where(is_one, tl.where(is_here, there, chunk), end)
            state = _through(state, chunk, stop, PAIRS, LEARNED, KNOWN, INSIDE, TOTALS, out, out_stride, strip_tokens,
                             tokens, first_token, v_dims, head, key_head, KEY_HEADS, VALUE_HEADS, K, V, PRECISION,
                             STAGES, PAST_L1)  # fmt: skip
            chunk = stop
            if is_here:
                found = _within(state, chunk, behind - chunk * CHUNK, PAIRS, LEARNED, KNOWN, TOTALS, strip_tokens,
                                v_dims, head, key_head, KEY_HEADS, VALUE_HEADS, K, V, PRECISION, PAST_L1)  # fmt: skip
                to = MATRIX + tl.load(SNAPSHOTS + snapshot + 1).to(tl.int64) * matrix_unit + matrix_first
                tl.store(to + element, found.to(MATRIX.dtype.element_ty))

    is_done = segment_end <= last_chunk
    page = MATRIX + tl.load(AFTER + sequence).to(tl.int64) * matrix_unit + matrix_first
    tl.store(page + element, state.to(MATRIX.dtype.element_ty), mask=is_done)
    tl.store(CARRIED + (1 - turn) * (VALUE_HEADS * K * V) + element, state, mask=is_done == 0)


@triton.jit(do_not_specialize=["first_row", "rows"])
def gated_norm_kernel(
    OUT, MADE, WEIGHT, out_stride, made_stride, first_row, rows, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (TOKENS rows, value head): norm what was read, times SiLU(z), in place."""
    wait_if_overlapped(PDL)
    PAST_L1: tl.constexpr = ".cg" if PDL else ""
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = (token < rows)[:, None]
    row = (first_row + token).to(tl.int64)[:, None]
    dims = tl.arange(0, V)[None, :]
    to = OUT + row * out_stride + head * V + dims
    o = tl.load(to, mask=mask, other=0.0, cache_modifier=PAST_L1).to(tl.float32)
    z_at = MADE + row * made_stride + (2 * KEY_HEADS * K + VALUE_HEADS * V + head * V) + dims
    z = tl.load(z_at, mask=mask, other=0.0, cache_modifier=PAST_L1).to(tl.float32)
    y = o * tl.rsqrt(tl.sum(o * o, 1) / V + eps)[:, None]
    if WEIGHT is not None:
        y *= tl.load(WEIGHT + dims)
    tl.store(to, (y * silu(z)).to(OUT.dtype.element_ty), mask=mask)
