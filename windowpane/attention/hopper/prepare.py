"""What the prefill kernels need besides pages and activations, made once per segment and layer, in plain Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from windowpane.attention.segments import window_edge
from windowpane.attention.triton.view import ELEMENTS, PagedLayer, rotate, section
from windowpane.schedule.step import Segment

ROTATE_TOKENS = 64


def copy_edges(
    k: torch.Tensor, v: torch.Tensor, layer: PagedLayer, segment: Segment, tile_tokens: int, out: torch.Tensor
) -> None:
    """Fill `out` [vectors, 2, KV heads, tile tokens, dim]: the tile in which the window begins and that of `start`.

    TMA copies whole pages. Where a tile is partly past, its rows lie in two places; where a window begins in it, rows
    before may hold anything or stand in no page, and 0 x NaN would be NaN in P.V. Rows of no token are 0 here.
    """
    view, table = layer.view, layer.table
    edge_tile = window_edge(segment, layer.mask, tile_tokens)
    if edge_tile < 0 and segment.start % tile_tokens == 0:
        return
    _edges_kernel[(2, view.kv_heads, len(view.data_offsets))](
        k, v, layer.arena, table, out, *segment[:4], edge_tile, layer.mask.first_visible(segment.start), k.stride(0),
        v.stride(0), table.stride(0), view.stripe, view.columns, view.data_offsets[0], view.data_offsets[-1],
        D=view.dim, P=view.block_tokens, UNIT=view.unit_elements, STRIPES=view.stripes, TILE=tile_tokens,
        DTYPE=ELEMENTS[view.dtype], num_warps=8,
    )  # fmt: skip


def rotate_keys(n: torch.Tensor, layer: PagedLayer, segment: Segment, out: torch.Tensor) -> None:
    """Fill `out` [KV heads, positions, 2R], up to the segment's end, with the rotary dims of K rebuilt from n."""
    view, table = layer.view, layer.table
    assert layer.rope is not None
    _rotate_kernel[(triton.cdiv(segment.stop, ROTATE_TOKENS), view.kv_heads)](
        n, layer.arena, table, *layer.rope, out, *segment[:4], n.stride(0), out.stride(0), table.stride(0), view.stripe,
        view.columns, view.data_offsets[0], D=view.dim, R=layer.rotary_pairs, P=view.block_tokens,
        UNIT=view.unit_elements, STRIPES=view.stripes, TILE=ROTATE_TOKENS, DTYPE=ELEMENTS[view.dtype], num_warps=8,
    )  # fmt: skip


@triton.jit
def _rows(
    PRESENT, ARENA, TABLE, slot, start, row, t, ok, head, stride, table_stride, stripe, columns, offset,
    D: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, STRIPES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Where the rows of tokens t lie: in pages or in the activations."""
    past = t < start
    table = TABLE + slot.to(tl.int64) * table_stride + stripe
    page = tl.load(table + t // P % columns * STRIPES, mask=ok & past, other=0).to(tl.int64)
    in_page = section(ARENA, offset, DTYPE) + page * UNIT + (head * P + t % P) * D
    return tl.where(past, in_page, PRESENT + (row + t - start).to(tl.int64) * stride + head * D)[:, None]


@triton.jit(
    do_not_specialize=[
        "slot", "start", "stop", "row", "edge_tile", "first_held", "table_stride", "stripe", "columns",
    ],
    do_not_specialize_on_alignment=["TABLE"],
)  # fmt: skip
def _edges_kernel(
    K, V, ARENA, TABLE, OUT, slot, start, stop, row, edge_tile, first_held, k_stride, v_stride, table_stride, stripe,
    columns, k_offset, v_offset, D: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, STRIPES: tl.constexpr,
    TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(0)
    head = tl.program_id(1)
    vector = tl.program_id(2)
    tile = tl.where(which == 0, edge_tile, start // TILE)
    n = tl.arange(0, TILE)
    d = tl.arange(0, D)[None, :]
    t = tile * TILE + n
    ok = (t >= first_held) & (t < stop)
    # Of a latent, what is stored is V; of a pair, vector 0 is K.
    first = vector + 1 < tl.num_programs(2)
    stride = tl.where(first, k_stride, v_stride)
    offset = tl.where(vector == 0, k_offset, v_offset)
    present = tl.where(first, K, V)
    rows = _rows(
        present, ARENA, TABLE, slot, start, row, t, ok, head, stride, table_stride, stripe, columns, offset, D, P, UNIT,
        STRIPES, DTYPE,
    )  # fmt: skip
    x = tl.load(rows + d, mask=ok[:, None], other=0.0)
    at = ((vector * 2 + which) * tl.num_programs(1) + head) * TILE + n
    tl.store(OUT + at[:, None] * D + d, x)


@triton.jit(
    do_not_specialize=["slot", "start", "stop", "row", "table_stride", "stripe", "columns"],
    do_not_specialize_on_alignment=["TABLE"],
)
def _rotate_kernel(
    N, ARENA, TABLE, COS, SIN, W, OUT, slot, start, stop, row, n_stride, out_stride, table_stride, stripe, columns,
    offset, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, STRIPES: tl.constexpr,
    TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    r = tl.arange(0, R)[None, :]
    ok = t < stop
    rows = _rows(
        N, ARENA, TABLE, slot, start, row, t, ok, head, n_stride, table_stride, stripe, columns, offset, D, P, UNIT,
        STRIPES, DTYPE,
    )  # fmt: skip
    ok = ok[:, None]
    x1 = tl.load(rows + r, mask=ok, other=0.0).to(tl.float32) * tl.load(W + r)
    x2 = tl.load(rows + R + r, mask=ok, other=0.0).to(tl.float32) * tl.load(W + R + r)
    cos = tl.load(COS + t[:, None] * R + r, mask=ok, other=0.0)
    sin = tl.load(SIN + t[:, None] * R + r, mask=ok, other=0.0)
    y1, y2 = rotate(x1, x2, cos, sin)
    # Rows after the last token, up to a whole tile, are 0.
    out = OUT + head * out_stride + t[:, None] * (2 * R) + r
    tl.store(out, y1.to(DTYPE))
    tl.store(out + R, y2.to(DTYPE))
