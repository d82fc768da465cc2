"""Adapters of many rows at once: rows are grouped by their adapter, and all groups take the same two launches.

`shrink` makes A · x, in splits of the inputs; `expand` adds the splits in order, and B · (A · x) to what is there.
Which rows have which adapter is read from tables on the device, so that a graph can be replayed with others. Grids are
as large as tables can be; programs beyond their ends return at once. No sum depends on timing or on other rows.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from windowpane.kv.retention import ceil_div
from windowpane.lowering.gpu.kernels.launch import wait_if_overlapped
from windowpane.models.adapters import SHRUNK_SPLITS

STEP = 128  # inputs at a time
SPLIT_INPUTS = 512  # of a split, at least
TILE_OUTPUTS = 128
LEAST_RANK = 16  # the narrowest side of a tensor-core product


class RowTiles(NamedTuple):
    """Rows by adapter, int32: `order` has the rows, `tiles` [tiles, 3] an adapter's place, and the first and the number
    of its rows in `order`, at most `rows` of them; none in a tile that is not used.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    rows: int


def shrink(x: torch.Tensor, a: torch.Tensor, by_adapter: RowTiles, *, pdl: bool) -> torch.Tensor:
    """float32 [splits, rows in `order`, parts × rank]: A · x of each split of the inputs.

    `a` is [places, parts, rank, inputs].
    """
    _, parts, rank, inputs = a.shape
    splits = min(SHRUNK_SPLITS, ceil_div(inputs, SPLIT_INPUTS))
    per_split = ceil_div(ceil_div(inputs, splits), STEP) * STEP
    splits = ceil_div(inputs, per_split)
    ranks = max(LEAST_RANK, triton.next_power_of_2(rank))
    order, tiles, rows = by_adapter
    out = torch.empty(splits, len(order), parts * ranks, dtype=torch.float32, device=x.device)
    shrink_kernel[(len(tiles), parts, splits)](
        x, a, order, tiles, out, x.stride(0), inputs, rank, len(order), per_split, PARTS=parts, ROWS=rows, RANKS=ranks,
        STEP=STEP, PDL=pdl, num_warps=4, num_stages=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


def expand(
    shrunk: torch.Tensor, b: torch.Tensor, sections: torch.Tensor, by_adapter: RowTiles, out: torch.Tensor, *, pdl: bool
) -> None:
    """out [rows, outputs] += B · shrunk. `b` is [places, outputs, rank]; `sections` [tiles, 3] int32 have the first
    output, the end of the outputs and the part of each tile of at most `TILE_OUTPUTS` outputs.
    """
    splits, count, width = shrunk.shape
    rank = b.shape[2]
    ranks = max(LEAST_RANK, triton.next_power_of_2(rank))
    order, tiles, rows = by_adapter
    expand_kernel[(len(tiles), len(sections))](
        shrunk, b, sections, order, tiles, out, b.stride(0), b.stride(1), rank, out.stride(0), count, width,
        SPLITS=splits, ROWS=rows, RANKS=ranks, OUTPUTS=TILE_OUTPUTS, PDL=pdl, num_warps=4 if rows <= 16 else 8,
        launch_pdl=pdl,
    )  # fmt: skip


# What varies from step to step must not lead to another kernel.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ORDER", "TILES"])
def shrink_kernel(
    X, A, ORDER, TILES, OUT, x_stride, inputs, rank, count, per_split, PARTS: tl.constexpr, ROWS: tl.constexpr,
    RANKS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: a tile of rows, a part and a split of the inputs."""
    wait_if_overlapped(PDL)
    at, part, split = TILES + tl.program_id(0) * 3, tl.program_id(1), tl.program_id(2)
    here = tl.load(at + 2, cache_modifier=".cg")
    if here == 0:
        return
    place = tl.load(at, cache_modifier=".cg").to(tl.int64)
    first = tl.load(at + 1, cache_modifier=".cg")
    m, r, k = tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, STEP)
    row = tl.load(ORDER + first + m, mask=m < here, other=0, cache_modifier=".cg").to(tl.int64)
    x_at = X + row[:, None] * x_stride
    a_at = A + ((place * PARTS + part) * rank + r)[:, None] * inputs
    sums = tl.zeros([ROWS, RANKS], tl.float32)
    end = tl.minimum((split + 1) * per_split, inputs)
    for start in tl.range(split * per_split, end, STEP):
        inside = (start + k < end)[None, :]
        x = tl.load(x_at + (start + k)[None, :], mask=(m < here)[:, None] & inside, other=0.0, cache_modifier=".cg")
        a = tl.load(a_at + (start + k)[None, :], mask=(r < rank)[:, None] & inside, other=0.0)
        sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee")
    to = OUT + (split.to(tl.int64) * count + first + m)[:, None] * (PARTS * RANKS) + part * RANKS + r[None, :]
    tl.store(to, sums, mask=(m < here)[:, None])


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ORDER", "TILES"])
def expand_kernel(
    SHRUNK, B, SECTIONS, ORDER, TILES, OUT, b_stride, b_output_stride, rank, out_stride, count, width,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program: a tile of rows and a tile of outputs."""
    wait_if_overlapped(PDL)
    at, section = TILES + tl.program_id(0) * 3, SECTIONS + tl.program_id(1) * 3
    here = tl.load(at + 2, cache_modifier=".cg")
    if here == 0:
        return
    place = tl.load(at, cache_modifier=".cg").to(tl.int64)
    first = tl.load(at + 1, cache_modifier=".cg")
    begin, end, part = tl.load(section), tl.load(section + 1), tl.load(section + 2)
    m, r, n = tl.arange(0, ROWS), tl.arange(0, RANKS), begin + tl.arange(0, OUTPUTS)
    row = tl.load(ORDER + first + m, mask=m < here, other=0, cache_modifier=".cg").to(tl.int64)
    from_at = SHRUNK + (first + m).to(tl.int64)[:, None] * width + part * RANKS + r[None, :]
    shrunk = tl.zeros([ROWS, RANKS], tl.float32)
    for split in tl.static_range(SPLITS):
        at_split = from_at + split * count.to(tl.int64) * width
        shrunk += tl.load(at_split, mask=(m < here)[:, None], other=0.0, cache_modifier=".cg")
    b_at = B + place * b_stride + n[:, None] * b_output_stride + r[None, :]
    b = tl.load(b_at, mask=(n < end)[:, None] & (r < rank)[None, :], other=0.0)
    sums = tl.dot(shrunk.to(b.dtype), tl.trans(b), input_precision="ieee")
    to, kept = OUT + row[:, None] * out_stride + n[None, :], (m < here)[:, None] & (n < end)[None, :]
    out = tl.load(to, mask=kept, other=0.0, cache_modifier=".cg").to(tl.float32)
    tl.store(to, (out + sums).to(OUT.dtype.element_ty), mask=kept)
