"""What the prefill kernels need besides pages and activations, made once per launch and layer, in plain Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from windowpane.attention.segments import Launch
from windowpane.attention.triton.view import ELEMENTS, PagedLayer, rotate, section
from windowpane.kv.hopper_scratch import EDGES
from windowpane.schedule.step import Segment

ROTATE_TOKENS = 64
FIELDS = tl.constexpr(len(Segment._fields))
_EDGES = tl.constexpr(EDGES)


def copy_edges(
    k: torch.Tensor, v: torch.Tensor, layer: PagedLayer, segments: torch.Tensor, launch: Launch, tile_tokens: int,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Fill `out` [vectors, segments, edges, KV heads, tile tokens, dim], for each segment of the launch: the tile in
    which the window begins, that of `start` and that of `stop`.

    TMA copies whole pages. Where a tile is partly past, its rows lie in two places; where a window begins in it, rows
    before may hold anything or stand in no page, and behind the last token other segments' rows follow: 0 x NaN would
    be NaN in P.V. Rows of no token are 0 here.
    """
    view, table = layer.view, layer.table
    vectors = len(view.data_offsets)
    _edges_kernel[(len(launch.members) * EDGES, view.kv_heads, vectors)](
        k, v, layer.arena, table, segments, launch.members, out, layer.reach_tokens, k.stride(0), v.stride(0),
        table.stride(0), view.stripe, view.columns, view.data_offsets[0], view.data_offsets[-1], out.stride(0),
        D=view.dim, P=view.block_tokens, UNIT=view.unit_elements, STRIPES=view.stripes, TILE=tile_tokens,
        DTYPE=ELEMENTS[view.dtype], num_warps=8,
    )  # fmt: skip


def rotate_keys(
    n: torch.Tensor, layer: PagedLayer, segments: torch.Tensor, launch: Launch, out: torch.Tensor
) -> None:  # fmt: skip
    """Fill `out` [KV heads, positions, 2R], where each segment of the launch has its rows up to its end, with the
    rotary dims of K rebuilt from n.
    """
    view, table = layer.view, layer.table
    assert layer.rope is not None
    _rotate_kernel[(triton.cdiv(launch.longest, ROTATE_TOKENS), view.kv_heads, len(launch.members))](
        n, layer.arena, table, *layer.rope, segments, launch.members, out, n.stride(0), out.stride(0), table.stride(0),
        view.stripe, view.columns, view.data_offsets[0], D=view.dim, R=layer.rotary_pairs, P=view.block_tokens,
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


@triton.jit
def _segment_of(SEGMENTS, MEMBERS, member):
    """Slot, start, stop and row of a launch's segment."""
    segment = SEGMENTS + tl.load(MEMBERS + member * 2) * FIELDS
    return tl.load(segment), tl.load(segment + 1), tl.load(segment + 2), tl.load(segment + 3)


@triton.jit(
    do_not_specialize=["reach", "table_stride", "stripe", "columns"],
    do_not_specialize_on_alignment=["TABLE", "SEGMENTS", "MEMBERS"],
)
def _edges_kernel(
    K, V, ARENA, TABLE, SEGMENTS, MEMBERS, OUT, reach, k_stride, v_stride, table_stride, stripe, columns, k_offset,
    v_offset, vector_stride, D: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, STRIPES: tl.constexpr,
    TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Program (segment and edge, KV head, stored vector)."""
    head = tl.program_id(1)
    vector = tl.program_id(2)
    which = tl.program_id(0) % _EDGES
    slot, start, stop, row = _segment_of(SEGMENTS, MEMBERS, tl.program_id(0) // _EDGES)
    first_held = tl.maximum(start - reach + 1, 0)
    at = tl.where(which == 0, first_held, tl.where(which == 1, start, stop))
    if at % TILE == 0:
        return
    n = tl.arange(0, TILE)
    d = tl.arange(0, D)[None, :]
    t = at // TILE * TILE + n
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
    to = (
        OUT
        + vector.to(tl.int64) * vector_stride
        + ((tl.program_id(0) * tl.num_programs(1) + head) * TILE + n)[:, None] * D
    )
    tl.store(to + d, x)


@triton.jit(
    do_not_specialize=["table_stride", "stripe", "columns"],
    do_not_specialize_on_alignment=["TABLE", "SEGMENTS", "MEMBERS"],
)
def _rotate_kernel(
    N, ARENA, TABLE, COS, SIN, W, SEGMENTS, MEMBERS, OUT, n_stride, out_stride, table_stride, stripe, columns, offset,
    D: tl.constexpr, R: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, STRIPES: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Program (tile of positions, KV head, segment)."""
    head = tl.program_id(1)
    slot, start, stop, row = _segment_of(SEGMENTS, MEMBERS, tl.program_id(2))
    if tl.program_id(0) * TILE >= stop:
        return
    first = tl.load(MEMBERS + tl.program_id(2) * 2 + 1)
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
    out = OUT + head * out_stride + (first + t)[:, None] * (2 * R) + r
    tl.store(out, y1.to(DTYPE))
    tl.store(out + R, y2.to(DTYPE))
