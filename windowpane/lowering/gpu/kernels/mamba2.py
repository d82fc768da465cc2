"""Mamba-2 between its two projections: convolution, scan and gated norm over states that lie in pages.

Rows that decode take one launch, which reads and writes each state once. Segments are convolved first; then a program
has some rows of one head's state to itself and goes through the tokens in chunks, so that nothing lies between chunks
but registers. Programs that share a norm count each other: the last to come norms what all have left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from windowpane.lowering.gpu.kernels.causal_convolution import convolve_segments, convolved, remember, rounded, silu
from windowpane.lowering.gpu.kernels.launch import FLAGS, flags_of, wait_if_overlapped
from windowpane.lowering.gpu.kernels.state_places import COUNT, FIELDS, ROW, StatePart, StatePlaces, snapshots_of
from windowpane.models.blocks import Mamba2

# Programs that keep a GPU busy: with fewer rows, a head's state is shared out.
ENOUGH_PROGRAMS = 256
LEAST_BLOCK = 16  # of a tensor-core product
# Values of a state that a program has in registers: more of them spill. Several programs then share a head.
DECODE_VALUES, SCAN_VALUES = 16384, 4096
CHUNK_TOKENS, FLOAT32_CHUNK_TOKENS = 64, 16  # float32 has no tensor cores


@dataclass(frozen=True, slots=True)
class Mamba2Layer:
    """A layer's tensors in float32, and where its states lie. `norm` None leaves norms to the caller."""

    described: Mamba2
    tails: tuple[StatePart, StatePart]  # of x, and of B and C
    matrix: StatePart
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    rates: torch.Tensor
    dt_bias: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor | None

    @property
    def inner(self) -> int:
        return self.described.heads * self.described.head_dim

    @property
    def multipliers(self) -> tuple[float, float, float, float, float]:
        return self.described.multipliers or (1.0,) * 5

    @property
    def gates_first(self) -> bool:
        """Whether gates multiply what is normed, or what a scan leaves and nobody norms here."""
        return not (self.described.norm is not None and self.described.norms_first)

    @property
    def norm_heads(self) -> int:
        """Heads that are normed together; 0 where nothing is normed here."""
        if self.norm is None:
            return 0
        return self.described.heads // (self.described.groups if self.described.norms_groups else 1)

    @property
    def state_block(self) -> int:
        block: int = max(LEAST_BLOCK, triton.next_power_of_2(self.described.state_dim))
        return block

    def block(self, values: int) -> int:
        """Dims of a head whose states are at most so many values."""
        block: int = min(triton.next_power_of_2(self.described.head_dim), values // self.state_block)
        return max(LEAST_BLOCK, block)

    def sizes(self, block: int) -> dict[str, Any]:
        described = self.described
        return {
            "HEADS": described.heads, "DIM": described.head_dim, "BLOCK": block, "GROUPS": described.groups,
            "STATE": described.state_dim, "STATE_BLOCK": self.state_block,
            "GATES": self.gates_first,
        }  # fmt: skip

    @property
    def norming(self) -> dict[str, Any]:
        width = max(self.norm_heads, 1) * self.described.head_dim
        return {
            "NORM_WIDTH": width, "NORM_BLOCK": triton.next_power_of_2(width), "NORMS_FIRST": self.described.norms_first,
        }  # fmt: skip


def decode_mamba2(
    made: torch.Tensor, places: StatePlaces, layer: Mamba2Layer, out: torch.Tensor,
    segments: torch.Tensor | None = None, *, pdl: bool = False,
) -> None:  # fmt: skip
    """out [rows, heads × dim] of `made` [rows, z | x | B | C | dt], a row of each sequence; their states go on.

    With `segments`, int32 [sequences, fields of Segment], a sequence has all rows that ask there, one after another.
    """
    rows, described = len(made), layer.described
    heads, dim = described.heads, described.head_dim
    # Beside several rows, less of a state fits into registers: fewer values to a program, and to a warp.
    values, warp_values = (DECODE_VALUES, 2048) if segments is None else (DECODE_VALUES // 2, 1024)
    block = layer.block(values)
    while block > LEAST_BLOCK and rows * heads * triton.cdiv(dim, block) < ENOUGH_PROGRAMS:
        block //= 2
    parts = triton.cdiv(dim, block)
    norms = heads // layer.norm_heads if layer.norm_heads else 0
    assert rows * norms <= FLAGS
    (x_tail, bc_tail), matrix, norm = layer.tails, layer.matrix, described.norm
    _decode_kernel[(len(places.starts), heads, parts)](
        made, *places.arguments, segments, x_tail.arena, matrix.arena, layer.conv, layer.conv_bias, layer.rates,
        layer.dt_bias, layer.skip, layer.norm, out, flags_of(made.device) if norms else None, made.stride(0),
        out.stride(0), x_tail.first, bc_tail.first, matrix.first, *described.dt_limits, norm.eps if norm else 0.0,
        *layer.multipliers,
        TAIL_UNIT=x_tail.unit, MATRIX_UNIT=matrix.unit, WIDTH=layer.conv.shape[1], SHARERS=layer.norm_heads * parts,
        PDL=pdl, num_warps=min(max(block * layer.state_block // warp_values, 1), 8), launch_pdl=pdl,
        **layer.sizes(block), **layer.norming,
    )  # fmt: skip


def chunk_mamba2(
    made: torch.Tensor, places: StatePlaces, segments: torch.Tensor, longest: int, first_row: int, layer: Mamba2Layer,
    out: torch.Tensor, snapshots: torch.Tensor | None = None, *, pdl: bool = False,
) -> None:  # fmt: skip
    """As `decode_mamba2`, of `segments`, int32 [n, fields of Segment], which take all rows from `first_row` on.

    `snapshots` are one of `snapshot_tables`, of pages that get the states in front of positions.
    """
    described, inner = layer.described, layer.inner
    heads, states = described.heads, described.groups * described.state_dim
    z_by, *conv_by, dt_by = layer.multipliers
    mixed = made.new_empty(len(made) - first_row, len(layer.conv))
    convolve_segments(
        made, inner, places, segments, longest, first_row, layer.tails, layer.conv, layer.conv_bias,
        (conv_by[0], conv_by[1], conv_by[2]), (inner, inner + states), mixed, snapshots, pdl=pdl,
    )  # fmt: skip
    block = layer.block(SCAN_VALUES)
    matrix = layer.matrix
    _scan_kernel[(len(segments), heads, triton.cdiv(described.head_dim, block))](
        mixed, made, *places[:3], segments, matrix.arena, snapshots, layer.rates, layer.dt_bias, layer.skip,
        out, mixed.stride(0), made.stride(0), out.stride(0), matrix.first, first_row, *described.dt_limits, z_by, dt_by,
        MATRIX_UNIT=matrix.unit, TOKENS=CHUNK_TOKENS if made.dtype.itemsize == 2 else FLOAT32_CHUNK_TOKENS, PDL=pdl,
        num_warps=4, num_stages=2, launch_pdl=pdl, **layer.sizes(block),
    )  # fmt: skip
    if layer.norm is not None:
        norm_segments(made, layer, out, first_row, pdl=pdl)


def norm_segments(
    made: torch.Tensor, layer: Mamba2Layer, out: torch.Tensor, first_row: int, *, pdl: bool = False
) -> None:
    """Norm rows of `out` in place, and gate them where that comes behind the norm."""
    norm = layer.described.norm
    assert norm is not None
    made, out = made[first_row:], out[first_row:]
    _norm_kernel[(len(out), layer.described.heads // layer.norm_heads)](
        made, layer.norm, out, made.stride(0), out.stride(0), norm.eps, layer.multipliers[0], PDL=pdl,
        num_warps=min(max(layer.norming["NORM_BLOCK"] // 512, 1), 16), launch_pdl=pdl, **layer.norming,
    )  # fmt: skip


@triton.jit
def _softplus(x):
    """log(1 + eˣ). With w = 1 + u rounded, log(w) · u / (w - 1) is log(1 + u) to the last digit."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    log = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _convolved_token(
    x, OLD, NEW, CONV, BIAS, channel, inside, known, keeps, WIDTH: tl.constexpr
):  # fmt: skip
    """SiLU(convolution) of one token of some channels, whose tails are in OLD and go on in NEW."""
    KEPT: tl.constexpr = WIDTH - 1
    total = tl.zeros(x.shape, tl.float32)
    for tap in tl.static_range(KEPT):
        value = tl.load(OLD + tap, mask=inside & known, other=0.0)
        total += value.to(tl.float32) * tl.load(CONV + channel * WIDTH + tap, mask=inside, other=0.0)
        if tap > 0:
            tl.store(NEW + (tap - 1), value, mask=inside & keeps)
    tl.store(NEW + (KEPT - 1), x.to(NEW.dtype.element_ty), mask=inside & keeps)
    total += x * tl.load(CONV + channel * WIDTH + KEPT, mask=inside, other=0.0)
    if BIAS is not None:
        total += tl.load(BIAS + channel, mask=inside, other=0.0)
    return silu(total)


@triton.jit
def _norm_together(
    OUT, GATES_AT, WEIGHT, eps, z_by, NORM_WIDTH: tl.constexpr, NORM_BLOCK: tl.constexpr, NORMS_FIRST: tl.constexpr
):
    """What lies at OUT, in place: other programs may have left it, so it is read past the L1 cache."""
    at = tl.arange(0, NORM_BLOCK)
    inside = at < NORM_WIDTH
    y = tl.load(OUT + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    y *= tl.rsqrt(tl.sum(y * y, 0) / NORM_WIDTH + eps)
    y *= tl.load(WEIGHT + at, mask=inside, other=0.0)
    if NORMS_FIRST:
        z = tl.load(GATES_AT + at, mask=inside, other=0.0)
        y *= silu(rounded(z, z_by, GATES_AT.dtype.element_ty))
    tl.store(OUT + at, y.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _norm_kernel(
    MADE, NORM, OUT, made_stride, out_stride, eps, z_by, NORM_WIDTH: tl.constexpr, NORM_BLOCK: tl.constexpr,
    NORMS_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, heads that are normed together)."""
    wait_if_overlapped(PDL)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * NORM_WIDTH
    to, gates = OUT + row * out_stride + first, MADE + row * made_stride + first
    _norm_together(to, gates, NORM + first, eps, z_by, NORM_WIDTH, NORM_BLOCK, NORMS_FIRST)


@triton.jit
def _convolved_row(
    X, stride, at, by, BEFORE, CONV, BIAS, channel, inside, known, WIDTH: tl.constexpr
):  # fmt: skip
    """The same of row `at` of a sequence, whose remembered inputs are in BEFORE."""
    total = convolved(X, stride, at, by, BEFORE, CONV + channel * WIDTH, inside, known, WIDTH)
    if BIAS is not None:
        total += tl.load(BIAS + channel, mask=inside, other=0.0)
    return silu(total)


@triton.jit
def _scanned(state, x, b, read, STEP, dt_by, rate, dt_bias, skip, low, high, DTYPE: tl.constexpr):
    """The state behind a token, and what the token reads there."""
    step = rounded(tl.load(STEP), dt_by, DTYPE)
    step = tl.minimum(tl.maximum(_softplus(step + dt_bias), low), high)
    state = state * tl.exp(-rate * step) + (x * step)[:, None] * b[None, :]
    return state, tl.sum(state * read[None, :], 1) + skip * x


@triton.jit
def _leave(
    y, OUT, GATES_AT, NORM, ARRIVED, row, head, p, in_head, eps, z_by, HEADS: tl.constexpr, DIM: tl.constexpr,
    GATES: tl.constexpr, SHARERS: tl.constexpr, NORM_WIDTH: tl.constexpr, NORM_BLOCK: tl.constexpr,
    NORMS_FIRST: tl.constexpr,
):  # fmt: skip
    """Store a row of OUT; who stores the last part of what is normed together norms it."""
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    c = head * DIM + p
    if GATES:
        z = tl.load(GATES_AT + c, mask=in_head, other=0.0)
        y *= silu(rounded(z, z_by, DTYPE))
    tl.store(OUT + c, y.to(DTYPE), mask=in_head)
    if SHARERS:
        norm = head * DIM // NORM_WIDTH
        arrived = ARRIVED + row * (HEADS * DIM // NORM_WIDTH) + norm
        tl.debug_barrier()  # all of y is there before it is counted
        if tl.atomic_add(arrived, 1, sem="acq_rel") == SHARERS - 1:
            tl.atomic_xchg(arrived, 0, sem="relaxed")
            first = norm * NORM_WIDTH
            _norm_together(
                OUT + first, GATES_AT + first, NORM + first, eps, z_by, NORM_WIDTH, NORM_BLOCK, NORMS_FIRST
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["BEFORE", "AFTER", "STARTS", "ASIDE", "SEGMENTS"])
def _decode_kernel(
    MADE, BEFORE, AFTER, STARTS, ASIDE, aside_stride, SEGMENTS, TAILS, MATRIX, CONV, CONV_BIAS, RATES, DT_BIAS, SKIP,
    NORM, OUT, ARRIVED, made_stride, out_stride, x_first, bc_first, matrix_first, low, high, eps, z_by, x_by, b_by,
    c_by, dt_by,
    TAIL_UNIT: tl.constexpr, MATRIX_UNIT: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, STATE: tl.constexpr, STATE_BLOCK: tl.constexpr, WIDTH: tl.constexpr, GATES: tl.constexpr,
    SHARERS: tl.constexpr, NORM_WIDTH: tl.constexpr, NORM_BLOCK: tl.constexpr, NORMS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, BLOCK of its dims). B and C are convolved by each head of a group; one keeps tails."""
    wait_if_overlapped(PDL)
    DTYPE: tl.constexpr = MADE.dtype.element_ty
    INNER: tl.constexpr = HEADS * DIM
    KEPT: tl.constexpr = WIDTH - 1
    sequence, head = tl.program_id(0), tl.program_id(1)
    p, n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE_BLOCK)
    in_head, in_state = p < DIM, n < STATE
    start = tl.load(STARTS + sequence)
    row, count = sequence, 1
    if SEGMENTS is not None:
        row, count = tl.load(SEGMENTS + sequence * FIELDS + ROW), tl.load(SEGMENTS + sequence * FIELDS + COUNT)
    made, to = MADE + row.to(tl.int64) * made_stride, OUT + row.to(tl.int64) * out_stride
    if start < 0:
        tl.store(to + head * DIM + p, tl.zeros([BLOCK], DTYPE), mask=in_head & (count > 0))
    else:
        known = start > 0
        before, after = tl.load(BEFORE + sequence).to(tl.int64), tl.load(AFTER + sequence).to(tl.int64)
        old, new = TAILS + before * TAIL_UNIT, TAILS + after * TAIL_UNIT
        if ASIDE is not None:
            old = ASIDE + sequence.to(tl.int64) * aside_stride
        group = head // (HEADS // GROUPS)
        keeps = (head % (HEADS // GROUPS) == 0) & (tl.program_id(2) == 0)
        xc, bc = head * DIM + p, group * STATE + n
        cc = bc + GROUPS * STATE
        x_at, b_at, c_at = x_first + xc * KEPT, bc_first + bc * KEPT, bc_first + cc * KEPT
        steps = made + 2 * INNER + 2 * GROUPS * STATE + head
        rate, dt_bias, skip = tl.load(RATES + head), tl.load(DT_BIAS + head), tl.load(SKIP + head)
        at = matrix_first + (head * DIM + p)[:, None] * STATE + n[None, :]
        inside = in_head[:, None] & in_state[None, :]
        state_at, state_to = MATRIX + before * MATRIX_UNIT + at, MATRIX + after * MATRIX_UNIT + at
        if SEGMENTS is None:
            x = rounded(tl.load(made + INNER + xc, mask=in_head, other=0.0), x_by, DTYPE)
            x = _convolved_token(x, old + x_at, new + x_at, CONV, CONV_BIAS, xc, in_head, known, True, WIDTH)
            b = rounded(tl.load(made + 2 * INNER + bc, mask=in_state, other=0.0), b_by, DTYPE)
            b = _convolved_token(b, old + b_at, new + b_at, CONV, CONV_BIAS, INNER + bc, in_state, known, keeps, WIDTH)
            read = rounded(tl.load(made + 2 * INNER + cc, mask=in_state, other=0.0), c_by, DTYPE)
            read = _convolved_token(
                read, old + c_at, new + c_at, CONV, CONV_BIAS, INNER + cc, in_state, known, keeps, WIDTH
            )
            state = tl.load(state_at, mask=inside & known, other=0.0).to(tl.float32)
            state, y = _scanned(state, x, b, read, steps, dt_by, rate, dt_bias, skip, low, high, DTYPE)
            tl.store(state_to, state.to(MATRIX.dtype.element_ty), mask=inside)
            _leave(
                y, to, made, NORM, ARRIVED, row, head, p, in_head, eps, z_by, HEADS, DIM, GATES, SHARERS, NORM_WIDTH,
                NORM_BLOCK, NORMS_FIRST,
            )  # fmt: skip
        else:
            xs, bs, cs = made + INNER + xc, made + 2 * INNER + bc, made + 2 * INNER + cc
            x_old, b_old, c_old = old + x_at, old + b_at, old + c_at
            state = tl.load(state_at, mask=inside & known, other=0.0).to(tl.float32)
            for i in range(count):
                x = _convolved_row(xs, made_stride, i, x_by, x_old, CONV, CONV_BIAS, xc, in_head, known, WIDTH)
                b = _convolved_row(bs, made_stride, i, b_by, b_old, CONV, CONV_BIAS, INNER + bc, in_state, known, WIDTH)
                read = _convolved_row(
                    cs, made_stride, i, c_by, c_old, CONV, CONV_BIAS, INNER + cc, in_state, known, WIDTH
                )
                state, y = _scanned(
                    state, x, b, read, steps + i * made_stride, dt_by, rate, dt_bias, skip, low, high, DTYPE
                )
                _leave(
                    y, to + i * out_stride, made + i * made_stride, NORM, ARRIVED, row + i, head, p, in_head, eps,
                    z_by, HEADS, DIM, GATES, SHARERS, NORM_WIDTH, NORM_BLOCK, NORMS_FIRST,
                )  # fmt: skip
                state = state.to(MATRIX.dtype.element_ty).to(tl.float32)  # as a step of one row stores it
            tl.store(state_to, state.to(MATRIX.dtype.element_ty), mask=inside)
            remember(xs, made_stride, count, x_by, x_old, new + x_at, in_head, known, True, WIDTH)
            remember(bs, made_stride, count, b_by, b_old, new + b_at, in_state, known, keeps, WIDTH)
            remember(cs, made_stride, count, c_by, c_old, new + c_at, in_state, known, keeps, WIDTH)


@triton.jit
def _steps_of(
    made, made_stride, head, t, here, bias, low, high, dt_by, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUPS: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """How far each token of a chunk steps: 0 behind the last one."""
    at = made + (t * made_stride + 2 * HEADS * DIM + 2 * GROUPS * STATE + head)
    step = rounded(tl.load(at, mask=here, other=0.0), dt_by, made.dtype.element_ty)
    return tl.where(here, tl.minimum(tl.maximum(_softplus(step + bias), low), high), 0.0)


@triton.jit
def _scanned_chunks(
    state, first, stop, count, row, first_row, MIXED, MADE, OUT, mixed_stride, made_stride, out_stride, head, p, rate,
    bias, skip, low, high, z_by, dt_by, HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr,
    STATE: tl.constexpr, STATE_BLOCK: tl.constexpr, TOKENS: tl.constexpr, GATES: tl.constexpr,
):  # fmt: skip
    """The state behind tokens [first, stop) of a segment of `count`, chunk by chunk; their outputs are stored."""
    DTYPE: tl.constexpr = MADE.dtype.element_ty
    t, n = tl.arange(0, TOKENS), tl.arange(0, STATE_BLOCK)
    in_head, in_state = p < DIM, n < STATE
    group = HEADS * DIM + head // (HEADS // GROUPS) * STATE
    # Offsets within a chunk have 32 bits: 64 would take most of the registers.
    t_mixed = t[:, None] * mixed_stride
    for chunk in tl.range(first, stop, TOKENS):
        here = chunk + t < count
        mixed, made = MIXED + (row + chunk - first_row) * mixed_stride, MADE + (row + chunk) * made_stride
        step = _steps_of(made, made_stride, head, t, here, bias, low, high, dt_by, HEADS, DIM, GROUPS, STATE)
        total = tl.cumsum(-rate * step, 0)
        last = tl.sum(-rate * step, 0)
        x_mask = here[:, None] & in_head[None, :]
        x = tl.load(mixed + (t_mixed + head * DIM + p[None, :]), mask=x_mask, other=0.0).to(tl.float32)
        state_mask = here[:, None] & in_state[None, :]
        b = tl.load(mixed + (t_mixed + group + n[None, :]), mask=state_mask, other=0.0)
        c = tl.load(mixed + (t_mixed + group + GROUPS * STATE + n[None, :]), mask=state_mask, other=0.0)
        sees = t[:, None] >= t[None, :]
        between = tl.exp(tl.where(sees, total[:, None] - total[None, :], 0.0))
        scores = tl.where(sees, tl.dot(c, tl.trans(b), input_precision="ieee") * between, 0.0)
        weighted = x * step[:, None]
        y = tl.dot(c, state.to(DTYPE), input_precision="ieee") * tl.exp(total)[:, None]
        y = tl.dot(scores.to(DTYPE), weighted.to(DTYPE), y, input_precision="ieee")
        gained = (weighted * tl.exp(last - total)[:, None]).to(DTYPE)
        state = tl.dot(tl.trans(b), gained, state * tl.exp(last), input_precision="ieee")
        y += skip * x
        if GATES:
            z = tl.load(made + (t[:, None] * made_stride + head * DIM + p[None, :]), mask=x_mask, other=0.0)
            y *= silu(rounded(z, z_by, DTYPE))
        to = OUT + (row + chunk) * out_stride + head * DIM
        tl.store(to + (t[:, None] * out_stride + p[None, :]), y.to(DTYPE), mask=x_mask)
    return state


@triton.jit
def _scanned_within(
    state, first, behind, row, first_row, MIXED, MADE, mixed_stride, made_stride, head, p, rate, bias, low, high,
    dt_by, HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    STATE_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The state behind the segment's first `behind` tokens, which end in the chunk that begins at `first`."""
    t, n = tl.arange(0, TOKENS), tl.arange(0, STATE_BLOCK)
    here = first + t < behind
    group = HEADS * DIM + head // (HEADS // GROUPS) * STATE
    mixed, made = MIXED + (row + first - first_row) * mixed_stride, MADE + (row + first) * made_stride
    step = _steps_of(made, made_stride, head, t, here, bias, low, high, dt_by, HEADS, DIM, GROUPS, STATE)
    total = tl.cumsum(-rate * step, 0)
    last = tl.sum(-rate * step, 0)
    at = mixed + t[:, None] * mixed_stride
    x = tl.load(at + head * DIM + p[None, :], mask=here[:, None] & (p < DIM)[None, :], other=0.0).to(tl.float32)
    b = tl.load(at + group + n[None, :], mask=here[:, None] & (n < STATE)[None, :], other=0.0)
    gained = (x * (step * tl.exp(last - total))[:, None]).to(MADE.dtype.element_ty)
    return tl.dot(tl.trans(b), gained, state * tl.exp(last), input_precision="ieee")


@triton.jit(
    do_not_specialize=["first_row"],
    do_not_specialize_on_alignment=["BEFORE", "AFTER", "STARTS", "SEGMENTS", "SNAPSHOTS"],
)
def _scan_kernel(
    MIXED, MADE, BEFORE, AFTER, STARTS, SEGMENTS, MATRIX, SNAPSHOTS, RATES, DT_BIAS, SKIP, OUT, mixed_stride,
    made_stride, out_stride, matrix_first, first_row, low, high, z_by, dt_by, MATRIX_UNIT: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    STATE_BLOCK: tl.constexpr, TOKENS: tl.constexpr, GATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (segment, head, BLOCK of its dims): chunks of TOKENS in turn. Within one, tokens see each other through
    C · Bᵀ, and all before through the state.
    """
    wait_if_overlapped(PDL)
    segment, head = tl.program_id(0), tl.program_id(1)
    n = tl.arange(0, STATE_BLOCK)
    p = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_head, in_state = p < DIM, n < STATE
    start = tl.load(STARTS + segment)
    row = tl.load(SEGMENTS + segment * FIELDS + ROW).to(tl.int64)
    count = tl.load(SEGMENTS + segment * FIELDS + COUNT)
    rate, bias, skip = tl.load(RATES + head), tl.load(DT_BIAS + head), tl.load(SKIP + head)
    # The state is [STATE, dims] here, so that every product has at least 64 rows.
    at = matrix_first + (head * DIM + p)[None, :] * STATE + n[:, None]
    inside = in_head[None, :] & in_state[:, None]
    before = tl.load(BEFORE + segment).to(tl.int64) * MATRIX_UNIT
    state = tl.load(MATRIX + before + at, mask=inside & (start > 0), other=0.0).to(tl.float32)
    if SNAPSHOTS is None:
        state = _scanned_chunks(
            state, 0, count, count, row, first_row, MIXED, MADE, OUT, mixed_stride, made_stride, out_stride, head, p,
            rate, bias, skip, low, high, z_by, dt_by, HEADS, DIM, GROUPS, STATE, STATE_BLOCK, TOKENS, GATES,
        )  # fmt: skip
    else:
        mine, others = snapshots_of(SNAPSHOTS, segment)
        first = 0
        for snapshot in range(mine, others + 2, 2):  # as far as each of them, and in the end as far as there is
            is_one = snapshot < others
            behind = tl.load(SNAPSHOTS + snapshot, mask=is_one, other=0) - start
            stop = tl.where(is_one, (behind - 1) // TOKENS * TOKENS, count)
            state = _scanned_chunks(
                state, first, stop, count, row, first_row, MIXED, MADE, OUT, mixed_stride, made_stride, out_stride,
                head, p, rate, bias, skip, low, high, z_by, dt_by, HEADS, DIM, GROUPS, STATE, STATE_BLOCK, TOKENS,
                GATES,
            )  # fmt: skip
            first = stop
            if is_one:
                found = _scanned_within(
                    state, first, behind, row, first_row, MIXED, MADE, mixed_stride, made_stride, head, p, rate, bias,
                    low, high, dt_by, HEADS, DIM, GROUPS, STATE, STATE_BLOCK, TOKENS,
                )  # fmt: skip
                page = tl.load(SNAPSHOTS + snapshot + 1).to(tl.int64) * MATRIX_UNIT
                tl.store(MATRIX + page + at, found.to(MATRIX.dtype.element_ty), mask=inside)
    after = tl.load(AFTER + segment).to(tl.int64) * MATRIX_UNIT
    tl.store(MATRIX + after + at, state.to(MATRIX.dtype.element_ty), mask=inside)
