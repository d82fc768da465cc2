"""Adapters of many rows at once: rows are grouped by their adapter, and all groups take the same launches.

`shrink` makes A · x, in splits of the inputs; `expand` adds the splits in order, and B · (A · x) to what is there.
`adapted_gated` does what `expand` does to a gate and what it gates while it multiplies them.
Which rows have which adapter is read from tables on the device, so that a graph can be replayed with others. Grids are
as large as tables can be; programs beyond their ends return at once. No sum depends on timing or on other rows.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels.gated import gate_times_up, is_gelu
from windowpane.models.adapters import SHRUNK_SPLITS

STEP = 256  # inputs at a time, at most
STAGES, SHARED_BYTES = 4, 128 * 1024  # steps on their way, and what they may take
SPLIT_INPUTS = 512  # of a split, at least
TILE_OUTPUTS = 128
ALIGNMENT = 16
GATED_OUTPUTS, GATED_RANKS = 128, 32  # of a tile; fewer outputs beyond so many ranks, as registers hold B
LEAST_ROWS = LEAST_RANK = 16  # the narrowest sides of a tensor-core product
NO_ADAPTER, UNUSED = -1, -2  # places of tiles whose rows have none, and of tiles without rows
NO_ROW = -1


class RowTiles(NamedTuple):
    """Rows by adapter, int32: `places` [tiles] has an adapter's place or one of the above, `rows` [tiles, rows of a
    tile] the rows that have it, `NO_ROW` behind the last.

    Nothing but a plain launch may write them in front of the kernels here: those look them up early.
    """

    places: torch.Tensor
    rows: torch.Tensor

    @property
    def launched_rows(self) -> int:
        """Of a program."""
        return max(LEAST_ROWS, self.rows.shape[1])


class Splits(NamedTuple):
    count: int
    inputs: int  # of each

    @classmethod
    def of(cls, inputs: int) -> Splits:
        per_split = ceil_div(ceil_div(inputs, min(SHRUNK_SPLITS, ceil_div(inputs, SPLIT_INPUTS))), STEP) * STEP
        return cls(ceil_div(inputs, per_split), per_split)


def _ranks(rank: int) -> int:
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


def empty_shrunk(a: torch.Tensor, by_adapter: RowTiles) -> torch.Tensor:
    """float32 [splits, rows of all tiles, parts × rank], for `shrink`.

    Where rows are many, one program makes all splits and adds them in the order in which they would be added later.
    """
    _, parts, rank, inputs = a.shape
    splits = Splits.of(inputs).count if by_adapter.launched_rows == LEAST_ROWS else 1
    return a.new_empty(splits, by_adapter.rows.numel(), parts * _ranks(rank), dtype=torch.float32)


def shrink(x: torch.Tensor, a: torch.Tensor, by_adapter: RowTiles, out: torch.Tensor, *, pdl: bool) -> None:
    """out (`empty_shrunk`) = A · x of each split of the inputs. `a` is [places, parts, rank, inputs]."""
    _, parts, rank, inputs = a.shape
    splits, (tiles, at_once) = Splits.of(inputs), by_adapter.rows.shape
    rows, ranks, step = by_adapter.launched_rows, _ranks(rank), STEP
    while STAGES * step * (rows + ranks) * x.element_size() > SHARED_BYTES:
        step //= 2
    shrink_kernel[(tiles * parts, len(out))](
        x, a, by_adapter.places, by_adapter.rows, out, x.stride(0), inputs, rank, tiles * at_once, splits.inputs,
        ADDS_SPLITS=len(out) < splits.count, AT_ONCE=at_once, PARTS=parts, ROWS=rows, RANKS=ranks, STEP=step, PDL=pdl,
        num_warps=4, num_stages=STAGES, launch_pdl=pdl,
    )  # fmt: skip


def expand(
    shrunk: torch.Tensor, b: torch.Tensor, sections: torch.Tensor, by_adapter: RowTiles, out: torch.Tensor,
    *, aligned: bool, pdl: bool,
) -> None:  # fmt: skip
    """out [rows, outputs] += B · shrunk. `b` is [places, outputs, rank]; `sections` [tiles, 3] int32 have the first
    output, the end of the outputs and the part of each tile of at most `TILE_OUTPUTS` outputs. `aligned`: all of those
    are multiples of `ALIGNMENT`, so that several outputs move at once.
    """
    (splits, count, width), rank, rows = shrunk.shape, b.shape[2], by_adapter.launched_rows
    expand_kernel[(len(by_adapter.places), len(sections))](
        shrunk, b, sections, by_adapter.places, by_adapter.rows, out, b.stride(0), b.stride(1), rank, out.stride(0),
        count, width, AT_ONCE=by_adapter.rows.shape[1], SPLITS=splits, ROWS=rows, RANKS=_ranks(rank),
        OUTPUTS=TILE_OUTPUTS, ALIGNMENT=ALIGNMENT if aligned else 1, PDL=pdl, num_warps=_warps(rows, rank),
        launch_pdl=pdl,
    )  # fmt: skip


def adapted_gated(
    made: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, parts: tuple[int, int], by_adapter: RowTiles,
    out: torch.Tensor, activation: str, *, pdl: bool,
) -> None:  # fmt: skip
    """out [rows, width] = activation(gate) × up, which `made` [rows, 2 × width] and what their `parts` of the adapters
    add are together. Rows without an adapter are made too; `made` stays as it is.
    """
    (splits, count, shrunk_width), rank, rows, width = shrunk.shape, b.shape[2], by_adapter.launched_rows, out.shape[1]
    outputs = max(LEAST_ROWS, GATED_OUTPUTS * GATED_RANKS // max(GATED_RANKS, _ranks(rank)))
    adapted_gated_kernel[(len(by_adapter.places), ceil_div(width, outputs))](
        made, shrunk, b, by_adapter.places, by_adapter.rows, out, made.stride(0), b.stride(0), b.stride(1), rank,
        out.stride(0), count, shrunk_width, width, GATE_PART=parts[0], UP_PART=parts[1],
        AT_ONCE=by_adapter.rows.shape[1], SPLITS=splits, ROWS=rows, RANKS=_ranks(rank), OUTPUTS=outputs,
        GELU=is_gelu(activation), PDL=pdl, num_warps=_warps(rows, rank), launch_pdl=pdl,
    )  # fmt: skip


def _warps(rows: int, rank: int) -> int:
    if rows > LEAST_ROWS:
        return 8
    return 2 if _ranks(rank) <= GATED_RANKS else 4


@triton.jit
def _tile_rows(TILE_ROWS, tile, AT_ONCE: tl.constexpr, ROWS: tl.constexpr):
    """The rows of a tile, negative where there are no more."""
    m = tl.arange(0, ROWS)
    row = tl.load(TILE_ROWS + tile.to(tl.int64) * AT_ONCE + m, mask=m < AT_ONCE, other=-1, cache_modifier=".cg")
    return row.to(tl.int64)


@triton.jit
def _sum_splits(
    SHRUNK, tile, part, count, width, AT_ONCE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """A · x [rows, ranks] of one part."""
    m, r = tl.arange(0, ROWS), tl.arange(0, RANKS)
    at = SHRUNK + (tile.to(tl.int64) * AT_ONCE + m)[:, None] * width + part * RANKS + r[None, :]
    sums = tl.zeros([ROWS, RANKS], tl.float32)
    for split in tl.static_range(SPLITS):
        at_split = at + split * count.to(tl.int64) * width
        sums += tl.load(at_split, mask=(m < AT_ONCE)[:, None], other=0.0, cache_modifier=".cg")
    return sums


@triton.jit
def _load_b(B, place, n, end, b_stride, b_output_stride, rank, RANKS: tl.constexpr):
    """B [outputs, ranks] of one adapter."""
    r = tl.arange(0, RANKS)
    at = B + place.to(tl.int64) * b_stride + n.to(tl.int64)[:, None] * b_output_stride + r[None, :]
    return tl.load(at, mask=(n < end)[:, None] & (r < rank)[None, :], other=0.0)


# What varies from step to step must not lead to another kernel.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["PLACES", "TILE_ROWS"])
def shrink_kernel(
    X, A, PLACES, TILE_ROWS, OUT, x_stride, inputs, rank, count, per_split, ADDS_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program: a tile of rows and a part, and a split of the inputs, or all of them."""
    if PDL:
        gdc_launch_dependents()
    tile, part, split = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    place = tl.load(PLACES + tile, cache_modifier=".cg").to(tl.int64)
    row = _tile_rows(TILE_ROWS, tile, AT_ONCE, ROWS)
    if PDL:
        gdc_wait()
    if place < 0:
        return
    m, r, k = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, STEP)
    x_at = X + row[:, None] * x_stride
    a_at = A + ((place * PARTS + part) * rank + r)[:, None] * inputs
    sums = tl.zeros([ROWS, RANKS], tl.float32)
    before = tl.zeros([ROWS, RANKS], tl.float32)  # sums of the splits before
    end = inputs if ADDS_SPLITS else tl.minimum((split + 1) * per_split, inputs)
    for start in tl.range(split * per_split, end, STEP):
        inside = (start + k < end)[None, :]
        x = tl.load(x_at + (start + k)[None, :], mask=(row >= 0)[:, None] & inside, other=0.0, cache_modifier=".cg")
        a = tl.load(a_at + (start + k)[None, :], mask=(r < rank)[:, None] & inside, other=0.0)
        sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee")
        if ADDS_SPLITS:
            ends = (start + STEP) % per_split == 0
            before += tl.where(ends, sums, 0.0)
            sums = tl.where(ends, 0.0, sums)
    sums += before
    at = split.to(tl.int64) * count + tile.to(tl.int64) * AT_ONCE + m
    tl.store(OUT + at[:, None] * (PARTS * RANKS) + part * RANKS + r[None, :], sums, mask=(m < AT_ONCE)[:, None])


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["PLACES", "TILE_ROWS"])
def expand_kernel(
    SHRUNK, B, SECTIONS, PLACES, TILE_ROWS, OUT, b_stride, b_output_stride, rank, out_stride, count, width,
    AT_ONCE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr,
    ALIGNMENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: a tile of rows and a tile of outputs."""
    if PDL:
        gdc_launch_dependents()
    tile, section = tl.program_id(0), SECTIONS + tl.program_id(1) * 3
    place = tl.load(PLACES + tile, cache_modifier=".cg")
    row = _tile_rows(TILE_ROWS, tile, AT_ONCE, ROWS)
    begin, end, part = tl.load(section), tl.load(section + 1), tl.load(section + 2)
    begin, end = tl.multiple_of(begin, ALIGNMENT), tl.multiple_of(end, ALIGNMENT)
    if place < 0:
        if PDL:
            gdc_wait()  # what follows takes this launch's end for that of all before it
        return
    n = begin + tl.arange(0, OUTPUTS)
    b = _load_b(B, place, n, end, b_stride, b_output_stride, rank, RANKS)
    to, kept = OUT + row[:, None] * out_stride + n[None, :], (row >= 0)[:, None] & (n < end)[None, :]
    if PDL:
        gdc_wait()
    out = tl.load(to, mask=kept, other=0.0, cache_modifier=".cg").to(tl.float32)
    shrunk = _sum_splits(SHRUNK, tile, part, count, width, AT_ONCE, SPLITS, ROWS, RANKS)
    sums = tl.dot(shrunk.to(b.dtype), tl.trans(b), input_precision="ieee")
    tl.store(to, (out + sums).to(OUT.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["PLACES", "TILE_ROWS"])
def adapted_gated_kernel(
    MADE, SHRUNK, B, PLACES, TILE_ROWS, OUT, made_stride, b_stride, b_output_stride, rank, out_stride, count,
    shrunk_width, width, GATE_PART: tl.constexpr, UP_PART: tl.constexpr, AT_ONCE: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: a tile of rows and a tile of gates. Sums are rounded as `expand_kernel` rounds them."""
    if PDL:
        gdc_launch_dependents()
    DTYPE: tl.constexpr = MADE.dtype.element_ty
    tile = tl.program_id(0)
    place = tl.load(PLACES + tile, cache_modifier=".cg")
    row = _tile_rows(TILE_ROWS, tile, AT_ONCE, ROWS)
    if place == -2:
        if PDL:
            gdc_wait()  # as in `expand_kernel`
        return
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    kept = (row >= 0)[:, None] & (n < width)[None, :]
    # A place below 0 reads nothing: its end is no output's.
    end = tl.where(place < 0, 0, width)
    b_gate = _load_b(B, place, n, end, b_stride, b_output_stride, rank, RANKS)
    b_up = _load_b(B + width * b_output_stride, place, n, end, b_stride, b_output_stride, rank, RANKS)
    if PDL:
        gdc_wait()
    at = MADE + row[:, None] * made_stride + n[None, :]
    gate = tl.load(at, mask=kept, other=0.0, cache_modifier=".cg")
    up = tl.load(at + width, mask=kept, other=0.0, cache_modifier=".cg")
    if place >= 0:
        shrunk = _sum_splits(SHRUNK, tile, GATE_PART, count, shrunk_width, AT_ONCE, SPLITS, ROWS, RANKS)
        to_up = shrunk
        if UP_PART != GATE_PART:
            to_up = _sum_splits(SHRUNK, tile, UP_PART, count, shrunk_width, AT_ONCE, SPLITS, ROWS, RANKS)
        gate_sums = tl.dot(shrunk.to(b_gate.dtype), tl.trans(b_gate), input_precision="ieee")
        up_sums = tl.dot(to_up.to(b_up.dtype), tl.trans(b_up), input_precision="ieee")
        gate, up = (gate.to(tl.float32) + gate_sums).to(DTYPE), (up.to(tl.float32) + up_sums).to(DTYPE)
    tl.store(OUT + row[:, None] * out_stride + n[None, :], gate_times_up(gate, up, GELU), mask=kept)
