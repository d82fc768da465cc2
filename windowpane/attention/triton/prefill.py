"""Prefill attention: chunks of several sequences in one launch, past from pages, present from activations.

A program takes one tile of query tokens and one KV head; all query heads of that KV head are rows of the tile, so K and
V are read once for them. Keys are walked in tiles of token positions: a row of a tile comes from its page if it is past
and from the activations if it is present, which is decided per row, before rows become addresses. So one loop does
both, and a chunk may begin anywhere in a tile.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from windowpane.attention.triton.view import (
    ELEMENTS,
    LayerView,
    PagedLayer,
    add_scores,
    column_of,
    first_visible,
    last_hidden,
    piece_start,
    ring_base,
    rotate,
    section,
    soft_capped,
    weighted,
    with_sinks,
)


@dataclass(frozen=True, slots=True)
class Tuning:
    """`rows` are query tokens times query heads of a KV head, `keys` are tokens."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# By (dim, latent), for 16-bit rows. 128 rows give each of two warp groups a 64-row product. 512 dims of output leave
# registers for 64 rows, and shared memory (227 KiB, q included) for 32 keys of a pair or 64 of a latent, twice.
TUNINGS = {
    (64, False): Tuning(128, 128, 8, 2),
    (128, False): Tuning(128, 128, 8, 2),
    (256, False): Tuning(128, 64, 8, 2),
    (512, False): Tuning(64, 32, 8, 3),
    (512, True): Tuning(64, 64, 8, 2),
}
# float32 runs for exactness, not for speed: tiles that fit any head.
EXACT = Tuning(16, 16, 4, 1)


def tuning_for(view: LayerView) -> Tuning:
    if view.dtype == torch.float32:
        return EXACT
    return TUNINGS.get((view.dim, view.latent), TUNINGS[512, view.latent])


def prefill_tile_tokens(view: LayerView, query_heads: int) -> int:
    """Query tokens of a tile: what `prefill_tiles` needs to know of a layer."""
    return tuning_for(view).rows // (query_heads // view.kv_heads)


def prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: PagedLayer, segments: torch.Tensor, tiles: torch.Tensor,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Causal attention of chunks. q and out [rows, query heads, dim], k and v [tokens, KV heads, dim] of the step.

    segments [n, 6], int32: (slot, start, stop, row, q_row, q_count). A segment is tokens [start, stop) of a slot, at
    rows `row`.. of k and v; its last q_count tokens ask, from rows `q_row`.. of q. `tiles` is what `prefill_tiles` made
    of the segments for this layer. Rows may be strided, a row itself is contiguous.

    Of a latent, v is n, and K is rebuilt from it for past and present alike: k is not looked at.
    """
    view, table, pairs = layer.view, layer.table, layer.rotary_pairs
    view.require_dtype(q)
    view.require_dtype(v)
    if not len(tiles):
        return
    tuning = tuning_for(view)
    cos, sin, w = layer.rope or (out,) * 3
    kernel = _latent_kernel if pairs else _pair_kernel
    kernel[(len(tiles), view.kv_heads)](
        q, k, v, layer.arena, table, segments, tiles, out, cos, sin, w, layer.scores.sinks, q.stride(0), k.stride(0),
        v.stride(0), out.stride(0), table.stride(0), view.columns, view.stripe, view.data_offsets[0],
        view.data_offsets[-1], layer.scale_log2, layer.reach_tokens, D=q.shape[2], R=pairs, P=view.block_tokens,
        G=layer.group, M=tuning.rows, N=tuning.keys, UNIT=view.unit_elements, STRIPES=view.stripes, RING=view.ring,
        CHUNKED=layer.mask.is_chunked, DTYPE=ELEMENTS[view.dtype], CAP=layer.softcap, num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )  # fmt: skip


@triton.jit
def _tile(SEGMENTS, TILES, head, M: tl.constexpr, G: tl.constexpr):
    """The segment of this program's tile: (slot, start, row), and of its queries the positions and rows of q."""
    TOKENS: tl.constexpr = M // G
    at = TILES + tl.program_id(0) * 2
    fields = SEGMENTS + tl.load(at) * 6
    start = tl.load(fields + 1)
    stop = tl.load(fields + 2)
    q_count = tl.load(fields + 5)
    skip = tl.load(at + 1) * TOKENS
    first_query = stop - q_count + skip
    last_query = tl.minimum(first_query + TOKENS, stop) - 1
    m = tl.arange(0, M)
    position = first_query + m // G
    asks = (m < TOKENS * G) & (position < stop)
    q_row = (tl.load(fields + 4) + skip + m // G).to(tl.int64)
    q_head = head * G + m % G
    return tl.load(fields), start, tl.load(fields + 3), first_query, last_query, position, asks, q_row, q_head


@triton.jit
def _pages_of(table, t, ok, base, columns, P: tl.constexpr, STRIPES: tl.constexpr, RING: tl.constexpr):
    return tl.load(table + column_of(t, base, columns, P, RING) * STRIPES, mask=ok, other=0).to(tl.int64)


@triton.jit
def _hide(s, t, position, reach, CHUNKED: tl.constexpr):
    """Scores of what a query cannot see: tokens after it, and those that its window or chunk has left."""
    return tl.where((t <= position) & (t > last_hidden(position, reach, CHUNKED)), s, float("-inf"))


@triton.jit
def _softmax(s, m, norm, scale_log2, TOKENS: tl.constexpr, CAP: tl.constexpr):
    """One more tile, with tokens along axis TOKENS: probabilities, and what the sums so far shrink by."""
    if CAP > 0:
        scale_log2 = 1.0  # capped scores are scaled already
    m_new = tl.maximum(m, tl.max(s, TOKENS) * scale_log2)
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s * scale_log2 - tl.expand_dims(m_new, TOKENS))
    return p, tl.expand_dims(alpha, TOKENS), m_new, norm * alpha + tl.sum(p, TOKENS)


# A decoded past has another table in every step.
_jit = triton.jit(
    do_not_specialize=["table_stride", "columns", "stripe"],
    do_not_specialize_on_alignment=["TABLE", "SEGMENTS", "TILES"],
)


@_jit
def _pair_kernel(
    Q, K, V, ARENA, TABLE, SEGMENTS, TILES, OUT, COS, SIN, W, SINKS, q_stride, k_stride, v_stride, out_stride,
    table_stride, columns, stripe, k_offset, v_offset, scale_log2, reach, D: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, STRIPES: tl.constexpr,
    RING: tl.constexpr, CHUNKED: tl.constexpr, DTYPE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    slot, start, row, first_query, last_query, position, asks, q_row, q_head = _tile(SEGMENTS, TILES, head, M, G)
    n = tl.arange(0, N)
    d = tl.arange(0, D)[None, :]
    q_at = (q_row * q_stride + q_head * D)[:, None] + d
    q = tl.load(Q + q_at, mask=asks[:, None], other=0.0)
    first = first_visible(first_query, reach, CHUNKED)
    base = ring_base(first, columns, P, RING)
    table = TABLE + slot.to(tl.int64) * table_stride + stripe
    past_k = section(ARENA, k_offset, DTYPE)
    past_v = section(ARENA, v_offset, DTYPE)
    m = tl.full([M], -1e30, tl.float32)
    norm = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for i in range(first // N * N, last_query + 1, N):
        t = i + n
        past = t < start
        ok = (t >= first) & (t <= last_query)
        page = _pages_of(table, t, ok & past, base, columns, P, STRIPES, RING)
        in_page = page * UNIT + (head * P + t % P) * D
        present_row = (row + t - start).to(tl.int64)
        k_row = tl.where(past, past_k + in_page, K + present_row * k_stride + head * D)
        v_row = tl.where(past, past_v + in_page, V + present_row * v_stride + head * D)
        # Rows that no token fills may be NaN, and 0 x NaN is NaN: they are never loaded.
        k = tl.load(k_row[:, None] + d, mask=ok[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAP > 0:
            s = soft_capped(s * scale_log2, CAP)
        if (i + N - 1 > first_query) | (i <= last_hidden(last_query, reach, CHUNKED)):
            s = _hide(s, t[None, :], position[:, None], reach, CHUNKED)
        p, alpha, m, norm = _softmax(s, m, norm, scale_log2, 1, CAP)
        v = tl.load(v_row[:, None] + d, mask=ok[:, None], other=0.0)
        acc = tl.dot(p.to(DTYPE), v, acc * alpha, input_precision="ieee")
    norm = with_sinks(norm, m, SINKS, q_head, asks)
    out_at = (q_row * out_stride + q_head * D)[:, None] + d
    tl.store(OUT + out_at, (acc / norm[:, None]).to(OUT.dtype.element_ty), mask=asks[:, None])


@_jit
def _latent_kernel(
    Q, K, V, ARENA, TABLE, SEGMENTS, TILES, OUT, COS, SIN, W, SINKS, q_stride, k_stride, v_stride, out_stride,
    table_stride, columns, stripe, k_offset, v_offset, scale_log2, reach, D: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, STRIPES: tl.constexpr,
    RING: tl.constexpr, CHUNKED: tl.constexpr, DTYPE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """K = rotate(n * w) and V = n, from one read of n. Dims [0, R) and [R, 2R) rotate; w of the others is in q.

    Tokens are the rows of both products and queries the columns, so that a tile of n feeds the tensor cores from shared
    memory both times, once as it is and once transposed.
    """
    head = tl.program_id(1)
    slot, start, row, first_query, last_query, position, asks, q_row, q_head = _tile(SEGMENTS, TILES, head, M, G)
    n = tl.arange(0, N)
    r = tl.arange(0, R)[None, :]
    e = tl.arange(0, 2 * R)[None, :]
    row_asks = asks[:, None]
    q = Q + (q_row * q_stride + q_head * D)[:, None]
    q1 = tl.load(q + r, mask=row_asks, other=0.0)
    q2 = tl.load(q + R + r, mask=row_asks, other=0.0)
    w1 = tl.load(W + r)
    w2 = tl.load(W + R + r)
    m = tl.full([M], -1e30, tl.float32)
    norm = tl.zeros([M], tl.float32)
    sums = (tl.zeros([R, M], tl.float32),) * 2
    still = ()
    for skipped in tl.static_range(2 * R, D, 2 * R):
        still += (weighted(q + skipped + e, W + skipped + e, row_asks, DTYPE),)
        sums += (tl.zeros([2 * R, M], tl.float32),)
    first = first_visible(first_query, reach, CHUNKED)
    base = ring_base(first, columns, P, RING)
    table = TABLE + slot.to(tl.int64) * table_stride + stripe
    past_x = section(ARENA, k_offset, DTYPE)
    for i in range(first // N * N, last_query + 1, N):
        t = i + n
        past = t < start
        ok = (t >= first) & (t <= last_query)
        page = _pages_of(table, t, ok & past, base, columns, P, STRIPES, RING)
        in_page = page * UNIT + (head * P + t % P) * D
        at = tl.where(past, past_x + in_page, V + (row + t - start).to(tl.int64) * v_stride + head * D)[:, None]
        row_ok = ok[:, None]
        # Rows that no token fills may be NaN, and 0 x NaN is NaN: they are never loaded.
        x = (tl.load(at + r, mask=row_ok, other=0.0), tl.load(at + R + r, mask=row_ok, other=0.0))
        cos = tl.load(COS + t[:, None] * R + r, mask=row_ok, other=0.0)
        sin = tl.load(SIN + t[:, None] * R + r, mask=row_ok, other=0.0)
        k1, k2 = rotate(x[0].to(tl.float32) * w1, x[1].to(tl.float32) * w2, cos, sin)
        s = add_scores(k1.to(DTYPE), q1, tl.zeros([N, M], tl.float32))
        s = add_scores(k2.to(DTYPE), q2, s)
        if D > 2 * R:
            x += (tl.load(at + 2 * R + e, mask=row_ok, other=0.0),)
            s = add_scores(x[2], still[0], s)
        if D > 4 * R:
            x += (tl.load(at + 4 * R + e, mask=row_ok, other=0.0), tl.load(at + 6 * R + e, mask=row_ok, other=0.0))
            s = add_scores(x[3], still[1], s)
            s = add_scores(x[4], still[2], s)
        if CAP > 0:
            s = soft_capped(s * scale_log2, CAP)
        if (i + N - 1 > first_query) | (i <= last_hidden(last_query, reach, CHUNKED)):
            s = _hide(s, t[:, None], position[None, :], reach, CHUNKED)
        p, alpha, m, norm = _softmax(s, m, norm, scale_log2, 0, CAP)
        p = p.to(DTYPE)
        more = ()
        for piece in tl.static_range(len(sums)):
            more += (tl.dot(tl.trans(x[piece]), p, sums[piece] * alpha, input_precision="ieee"),)
        sums = more
    out = OUT + (q_row * out_stride + q_head * D)[:, None]
    norm = with_sinks(norm, m, SINKS, q_head, asks)[None, :]
    for piece in tl.static_range(len(sums)):
        d = tl.arange(0, sums[piece].shape[0])[None, :]
        tl.store(out + piece_start(piece, R) + d, tl.trans(sums[piece] / norm).to(OUT.dtype.element_ty), mask=row_asks)
