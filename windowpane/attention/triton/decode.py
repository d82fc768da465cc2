"""Decode attention over pages: one token per sequence, its past from pages, itself from the activations.

All tiles of 64 past tokens of all rows and KV heads form one line, row by row and head by head. A fixed number of
programs takes equal shares of the line, so that any mix of lengths fills the GPU, and a CUDA graph can replay the same
launches at any lengths. Where the line enters another row or head, a program begins a new *item*; each (program, item)
leaves a partial result, and `combine` merges those of an item with the present token. An item that one program has
all of is ended by it.

    items     |. . . . .|. .|. . . .|     a partial result stands in slot program + item: each cut along the line raises
    programs  |. . . .|. . . .|. . .|     one of the two, so no slot is taken twice
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.attention.mask import Mask
from windowpane.attention.triton.codes import operand_type
from windowpane.attention.triton.decode_coded import coded_latent_item, coded_pair_item, present_weight
from windowpane.attention.triton.decode_combine import combine_kernel, combine_rows_kernel, share_of
from windowpane.attention.triton.decode_several import (
    FIELDS,
    K_STRIDE,
    PRESENT,
    Q_STRIDE,
    V_STRIDE,
    asks,
    first_seen,
    leave_rows,
    places,
    present_rows,
    present_scores,
    rows_at_once,
    seen_present,
)
from windowpane.attention.triton.decode_tunings import Tuning, tuning_for, tuning_for_rows
from windowpane.attention.triton.view import (
    ELEMENTS,
    LayerView,
    PagedLayer,
    add_scores,
    column_of,
    first_visible,
    piece_start,
    processors_of,
    reach_of,
    ring_base,
    rotate,
    section,
    soft_capped,
    weighted,
    with_sinks,
)
from windowpane.kv.layout import OFFSET_UNIT_BYTES, TILE_TOKENS

MAX_ROWS = 1024  # every program looks at the running sums of all rows at once
GROUP_ROWS = 16  # query heads of a KV head fill a tensor-core tile of 16 rows; fewer are padded
MOST_COMBINED = 2048  # query heads of all rows, up to which each has a program that merges its parts
FEW_HEADS = 8  # as columns, for coded rows, they are padded to this
UNIT_BYTES = tl.constexpr(OFFSET_UNIT_BYTES)
LINE_BYTES = tl.constexpr(128)  # of L2


def decode_programs(view: LayerView, device: torch.device) -> int:
    """How many programs share a step of this layer."""
    return tuning_for(view).programs_per_sm * processors_of(device)


def rows_programs(view: LayerView, group: int, rows: int, device: torch.device) -> int:
    """How many programs share a step of segments with at most so many rows."""
    return tuning_for_rows(view, group * rows).programs_per_sm * processors_of(device)


class DecodeScratch:
    """Where programs leave partial results; layers may share one, since each step of a layer overwrites it.

    It starts as NaN, so that a result nobody wrote would show.
    """

    def __init__(self, max_rows: int, kv_heads: int, group: int, dim: int, programs: int, device: torch.device) -> None:
        self._make(programs, programs + max_rows * kv_heads, group, dim, device)

    @classmethod
    def of_rows(cls, view: LayerView, group: int, rows: int, device: torch.device) -> DecodeScratch:
        """For segments of at most so many rows. A program leaves at most two parts: of its first item and its last."""
        made, programs = cls.__new__(cls), rows_programs(view, group, rows, device)
        made._make(programs, 2 * programs, group * rows, view.dim, device)
        return made

    def _make(self, programs: int, slots: int, group: int, dim: int, device: torch.device) -> None:
        self.programs = programs
        self.part = torch.full((slots * group * dim,), float("nan"), device=device)
        self.lse = torch.full((slots * group,), float("nan"), device=device)


def plan_decode(positions: torch.Tensor, cum_tiles: torch.Tensor, mask: Mask) -> None:
    """Fill `cum_tiles` [rows + 1]: how many tiles the rows before each must read. Layers with one mask share it.

    positions [rows] count past tokens; -1 marks a padding row, which reads nothing. All int32.
    """
    rows = len(positions)
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows decode at once; kernels take at most {MAX_ROWS}")
    _plan_kernel[(1,)](
        positions, cum_tiles, rows, reach_of(mask), CHUNKED=mask.is_chunked, TILE=TILE_TOKENS, MAX_ROWS=MAX_ROWS,
        num_warps=4,
    )  # fmt: skip


def plan_rows(segments: torch.Tensor, cum_tiles: torch.Tensor, mask: Mask) -> None:
    """As `plan_decode`, for `segments` [segments, 6]: those that begin at -1 are padding, and read nothing."""
    count = len(segments)
    if count > MAX_ROWS:
        raise ValueError(f"{count} segments verify at once; kernels take at most {MAX_ROWS}")
    _plan_kernel[(1,)](
        segments, cum_tiles, count, reach_of(mask), CHUNKED=mask.is_chunked, TILE=TILE_TOKENS, MAX_ROWS=MAX_ROWS,
        SEVERAL=True, num_warps=4,
    )  # fmt: skip


def decode(
    q: torch.Tensor, k_present: torch.Tensor, v_present: torch.Tensor, layer: PagedLayer, slots: torch.Tensor,
    positions: torch.Tensor, cum_tiles: torch.Tensor, scratch: DecodeScratch, out: torch.Tensor, *, pdl: bool = False,
) -> None:  # fmt: skip
    """One token per row: attend its past and itself. q, out [rows, query heads, dim], present [rows, KV heads, dim].

    The lists are int32 on the device; `cum_tiles` is what `plan_decode` made of `positions` for this mask. Rows may be
    strided, a row itself is contiguous. Padding rows become 0.

    Of a latent, pages hold n; q is rotated as usual, k_present is the present token's rebuilt K, and v_present its n.
    `pdl` lets a launch begin while the one before it ends, and look up the lists and the table by then: between whoever
    wrote those and this there must be a plain launch.
    """
    view, group, sinks = layer.view, layer.group, layer.scores.sinks
    view.require_dtype(q)
    rows, query_heads, dim = q.shape
    if group > GROUP_ROWS:
        raise ValueError(f"{group} query heads share a KV head; kernels take at most {GROUP_ROWS}")
    tuning = tuning_for(view, q.dtype, lone_window=rows == 1 and layer.mask.is_windowed)
    _launch(q, k_present, v_present, layer, slots, positions, cum_tiles, scratch, out, rows, 1, tuning, pdl)
    # Most items of many rows are whole: their programs only take time to begin, and fewer take less.
    heads = group & -group if rows * query_heads > MOST_COMBINED else 1
    warps = max(1, dim // 32) if rows == 1 else max(1, heads * dim // 512, dim // 128)
    combine_kernel[(query_heads // heads, rows)](
        q, k_present, v_present, scratch.part, scratch.lse, positions, cum_tiles, out, sinks, rows, view.kv_heads,
        scratch.programs, q.stride(0), k_present.stride(0), v_present.stride(0), out.stride(0), layer.scale_log2, D=dim,
        G=group, HEADS=heads, S=max(2, 16 // heads), CAP=layer.softcap, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip


def _launch(
    q: torch.Tensor, k_present: torch.Tensor, v_present: torch.Tensor, layer: PagedLayer, slots: torch.Tensor,
    positions: torch.Tensor, cum_tiles: torch.Tensor, scratch: DecodeScratch, out: torch.Tensor, count: int, rows: int,
    tuning: Tuning, pdl: bool,
) -> None:  # fmt: skip
    view, table, tile_rows = layer.view, layer.table, layer.group * rows
    cos, sin, w = layer.rope or (scratch.lse,) * 3
    dtype = operand_type(view.code, q.dtype) if view.code else ELEMENTS[view.dtype]
    least = FEW_HEADS if view.code and tile_rows <= FEW_HEADS else GROUP_ROWS
    _decode_kernel[(scratch.programs,)](
        q, k_present, v_present, layer.arena, table, slots, positions, cum_tiles, cos, sin, w, scratch.part,
        scratch.lse, out, layer.scores.sinks, count, view.kv_heads, q.stride(0), k_present.stride(0),
        v_present.stride(0), out.stride(0), table.stride(0), view.columns, view.stripe, view.data_offsets[0],
        view.data_offsets[-1], *view.scales_at(), *((view.layer_scales * 2)[:2] or (1.0, 1.0)), layer.scale_log2,
        layer.reach_tokens, D=q.shape[2], R=layer.rotary_pairs, P=view.block_tokens, G=layer.group,
        N=tuning.tile_tokens, UNIT=view.unit_elements, STRIPES=view.stripes, RING=view.ring,
        CHUNKED=layer.mask.is_chunked, DTYPE=dtype, CODE=view.code, PER_ROW=bool(view.scale_offsets),
        ROW=view.row_words, TILE=TILE_TOKENS, MAX_ROWS=MAX_ROWS,
        GROUP_ROWS=max(least, triton.next_power_of_2(tile_rows)), CAP=layer.softcap, PDL=pdl, ROWS=rows,
        num_warps=tuning.num_warps, num_stages=tuning.num_stages, maxnreg=tuning.registers, launch_pdl=pdl,
    )  # fmt: skip


def decode_rows(
    q: torch.Tensor, k_present: torch.Tensor, v_present: torch.Tensor, layer: PagedLayer, segments: torch.Tensor,
    cum_tiles: torch.Tensor, scratch: DecodeScratch, out: torch.Tensor, *, rows: int, pdl: bool = False,
) -> None:  # fmt: skip
    """At most `rows` rows of each segment, in one pass over its pages: each attends its past and those before it.

    As `decode`, with `segments` [segments, 6] int32 on the device (the fields of `Segment`) in the place of slots and
    positions; `cum_tiles` is what `plan_rows` made of them. Rows of q and out that no segment asks for are left alone,
    and those of padding become 0.
    A segment has at most 16 tokens, and `rows_at_once` says how many may ask: `split_rows` makes several of one.
    """
    view, group, count = layer.view, layer.group, len(segments)
    view.require_dtype(q)
    _, query_heads, dim = q.shape
    if not 2 <= rows <= rows_at_once(group, dim):
        raise ValueError(
            f"{rows} rows of {group} query heads and {dim} dims; kernels take 2 to {rows_at_once(group, dim)}"
        )
    tuning, sinks = tuning_for_rows(view, group * rows, q.dtype), layer.scores.sinks
    _launch(q, k_present, v_present, layer, segments, segments, cum_tiles, scratch, out, count, rows, tuning, pdl)
    combine_rows_kernel[(query_heads, count * rows)](
        scratch.part, scratch.lse, segments, cum_tiles, out, sinks, count, view.kv_heads, scratch.programs,
        out.stride(0), D=dim, G=group, S=16, ROWS=rows, PDL=pdl, num_warps=max(1, dim // 128), launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["POSITIONS", "CUM"])
def _plan_kernel(
    POSITIONS, CUM, rows, reach, CHUNKED: tl.constexpr, TILE: tl.constexpr, MAX_ROWS: tl.constexpr,
    SEVERAL: tl.constexpr = False,
):  # fmt: skip
    row = tl.arange(0, MAX_ROWS)
    ok = row < rows
    if SEVERAL:
        past = tl.load(POSITIONS + row * FIELDS + 1, mask=ok, other=-1)
        asking = tl.load(POSITIONS + row * FIELDS + 5, mask=ok, other=0)
        first = first_visible(tl.load(POSITIONS + row * FIELDS + 2, mask=ok, other=0) - asking, reach, CHUNKED)
        tiles = tl.where(past > first, (past + TILE - 1) // TILE - first // TILE, 0)
        tiles = tl.where((asking > 0) & (past >= 0), tiles + 1, 0)  # the segment's own tokens are one more
    else:
        position = tl.load(POSITIONS + row, mask=ok, other=-1)
        first = first_visible(position, reach, CHUNKED)
        tiles = tl.where(position > first, (position + TILE - 1) // TILE - first // TILE, 0)
    tl.store(CUM + 1 + row, tl.cumsum(tiles), mask=ok)
    tl.store(CUM + row, 0, mask=row == 0)


@triton.jit
def _pair_item(
    Q, ARENA, table, PART, LSE, slot, head, lo, hi, first, past, base, q_row, columns, k_offset, v_offset, scale_log2,
    whole, K_PRESENT, V_PRESENT, OUT, SINKS, ends, several, D: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, UNIT: tl.constexpr, STRIPES: tl.constexpr, RING: tl.constexpr, DTYPE: tl.constexpr,
    GROUP_ROWS: tl.constexpr, CAP: tl.constexpr, ROWS: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    g = tl.arange(0, GROUP_ROWS)
    n = tl.arange(0, N)
    d = tl.arange(0, D)[None, :]
    q = Q + q_row + places(g, several, Q_STRIDE, D, G, ROWS)[:, None] + d
    q = tl.load(q, mask=asks(g, several, G, ROWS)[:, None], other=0.0)
    K = section(ARENA, k_offset, DTYPE)
    V = section(ARENA, v_offset, DTYPE)
    m = tl.full([GROUP_ROWS], -1e30, tl.float32)
    norm = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, D], tl.float32)
    for i in range(lo, hi, N):
        t = i + n
        ok = (t >= first) & (t < past)
        page = tl.load(table + column_of(t, base, columns, P, RING) * STRIPES, mask=ok, other=0).to(tl.int64)
        start = (page * UNIT + (head * P + t % P) * D)[:, None] + d
        # Rows that no token fills may be NaN, and 0 x NaN is NaN: they are never loaded.
        k = tl.load(K + start, mask=ok[:, None], other=0.0)
        s = soft_capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2, CAP)
        seen = ok[None, :]
        if ROWS > 1:
            seen &= t[None, :] >= first_seen(g, several, G, CHUNKED)[:, None]
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, None])
        norm = norm * alpha + tl.sum(p, 1)
        m = m_new
        v = tl.load(V + start, mask=ok[:, None], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    if ROWS > 1:
        if ends:
            k = present_rows(K_PRESENT, several[K_STRIDE], 0, past, several, D, G)
            s = soft_capped(tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2, CAP)
            s = tl.where(tl.trans(seen_present(g, past, several, G, CHUNKED)), s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            alpha = tl.exp2(m - m_new)
            p = tl.exp2(s - m_new[:, None])
            norm = norm * alpha + tl.sum(p, 1)
            m = m_new
            v = present_rows(V_PRESENT, several[V_STRIDE], 0, past, several, D, G)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        leave_rows(PART, LSE, OUT, SINKS, slot, head, m, norm, acc, whole, several, 0, D, G, ROWS)
    elif whole:
        # Nobody else has a part of this item: the present token ends it.
        k = tl.load(K_PRESENT + d).to(tl.float32)
        s = soft_capped(tl.sum(q.to(tl.float32) * k, 1) * scale_log2, CAP)
        m_new = tl.maximum(m, s)
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new)
        acc = acc * alpha[:, None] + p[:, None] * tl.load(V_PRESENT + d).to(tl.float32)
        norm = with_sinks(norm * alpha + p, m_new, SINKS, head * G + g, g < G)
        attended = (acc / norm[:, None]).to(OUT.dtype.element_ty)
        tl.store(OUT + g[:, None] * D + d, attended, mask=g[:, None] < G)
    else:
        out = slot * G + g
        tl.store(PART + out[:, None] * D + d, acc / norm[:, None], mask=g[:, None] < G)
        tl.store(LSE + out, m + tl.log2(norm), mask=g < G)


@triton.jit
def _latent_item(
    Q, ARENA, table, COS, SIN, W, PART, LSE, slot, head, lo, hi, first, past, base, q_row, columns, n_offset,
    scale_log2, whole, K_PRESENT, V_PRESENT, OUT, SINKS, ends, several, D: tl.constexpr, R: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, STRIPES: tl.constexpr, RING: tl.constexpr,
    DTYPE: tl.constexpr, GROUP_ROWS: tl.constexpr, CAP: tl.constexpr, ROWS: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """K = rotate(n * w) and V = n, from one read of n. Tokens are the rows of both products, query heads the columns.

    So a tile feeds the tensor cores from shared memory as it is, and q, wide as it is, takes no registers. With t0 the
    first token of a tile, q . R(t) y = R(-t0) q . R(t - t0) y: R(t - t0) is the same for all tiles and stays in
    registers, and q rotates by one fixed step from tile to tile. n is read in pieces of R and 2R dims: few rows to a
    thread, so few addresses.
    """
    g = tl.arange(0, GROUP_ROWS)
    n = tl.arange(0, N)
    r = tl.arange(0, R)[None, :]
    e = tl.arange(0, 2 * R)[None, :]
    g_ok = asks(g, several, G, ROWS)[:, None]
    q = Q + q_row + places(g, several, Q_STRIDE, D, G, ROWS)[:, None]
    q1 = tl.load(q + r, mask=g_ok, other=0.0).to(tl.float32)
    q2 = tl.load(q + R + r, mask=g_ok, other=0.0).to(tl.float32)
    q1, q2 = rotate(q1, q2, tl.load(COS + lo * R + r), -tl.load(SIN + lo * R + r))
    w1 = tl.load(W + r)
    w2 = tl.load(W + R + r)
    # The tables may end before N if the past does.
    cos = tl.load(COS + n[:, None] * R + r, mask=n[:, None] < past, other=0.0)
    sin = tl.load(SIN + n[:, None] * R + r, mask=n[:, None] < past, other=0.0)
    step_cos = tl.load(COS + N * R + r, mask=(r >= 0) & (past > N), other=0.0)
    step_sin = tl.load(SIN + N * R + r, mask=(r >= 0) & (past > N), other=0.0)
    m = tl.full([GROUP_ROWS], -1e30, tl.float32)
    norm = tl.zeros([N, GROUP_ROWS], tl.float32)  # summed over tokens at the end
    sums = (tl.zeros([R, GROUP_ROWS], tl.float32),) * 2
    still = ()
    for start in tl.static_range(2 * R, D, 2 * R):  # w of the dims that do not rotate is folded into q
        still += (weighted(q + start + e, W + start + e, g_ok, DTYPE),)
        sums += (tl.zeros([2 * R, GROUP_ROWS], tl.float32),)
    X = section(ARENA, n_offset, DTYPE)
    for i in range(lo, hi, N):
        t = i + n
        ok = (t >= first) & (t < past)
        row_ok = ok[:, None]
        page = tl.load(table + column_of(t, base, columns, P, RING) * STRIPES, mask=ok, other=0).to(tl.int64)
        at = X + (page * UNIT + (head * P + t % P) * D)[:, None]
        # Rows that no token fills may be NaN, and 0 x NaN is NaN: they are never loaded.
        x = (tl.load(at + r, mask=row_ok, other=0.0), tl.load(at + R + r, mask=row_ok, other=0.0))
        k1, k2 = rotate(x[0].to(tl.float32) * w1, x[1].to(tl.float32) * w2, cos, sin)
        s = add_scores(k1.to(DTYPE), q1.to(DTYPE), tl.zeros([N, GROUP_ROWS], tl.float32))
        s = add_scores(k2.to(DTYPE), q2.to(DTYPE), s)
        q1, q2 = rotate(q1, q2, step_cos, -step_sin)
        if D > 2 * R:
            x += (tl.load(at + 2 * R + e, mask=row_ok, other=0.0),)
            s = add_scores(x[2], still[0], s)
        if D > 4 * R:
            x += (tl.load(at + 4 * R + e, mask=row_ok, other=0.0), tl.load(at + 6 * R + e, mask=row_ok, other=0.0))
            s = add_scores(x[3], still[1], s)
            s = add_scores(x[4], still[2], s)
        seen = row_ok
        if ROWS > 1:
            seen &= t[:, None] >= first_seen(g, several, G, CHUNKED)[None, :]
        s = tl.where(seen, soft_capped(s * scale_log2, CAP), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        alpha = tl.exp2(m - m_new)[None, :]
        p = tl.exp2(s - m_new[None, :])
        norm = norm * alpha + p
        m = m_new
        p = p.to(DTYPE)
        more = ()
        for piece in tl.static_range(len(sums)):
            more += (tl.dot(tl.trans(x[piece]), p, sums[piece] * alpha, input_precision="ieee"),)
        sums = more
    total = tl.sum(norm, 0)
    if ROWS > 1:
        alpha = m * 0.0 + 1.0
        p = tl.zeros([PRESENT, GROUP_ROWS], DTYPE)
        if ends:
            s = present_scores(q, g_ok, K_PRESENT, past, several, 2 * R, D, G, GROUP_ROWS)
            s = tl.where(seen_present(g, past, several, G, CHUNKED), soft_capped(s * scale_log2, CAP), float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 0))
            alpha = tl.exp2(m - m_new)
            weights = tl.exp2(s - m_new[None, :])
            total = total * alpha + tl.sum(weights, 0)
            m = m_new
            p = weights.to(DTYPE)
        for piece in tl.static_range(len(sums)):
            acc = sums[piece] * alpha[None, :]
            if ends:
                first_dim = piece_start(piece, R)
                v = present_rows(V_PRESENT, several[V_STRIDE], first_dim, past, several, acc.shape[0], G)
                acc = tl.dot(tl.trans(v), p, acc, input_precision="ieee")
            leave_rows(
                PART, LSE, OUT, SINKS, slot, head, m, total, tl.trans(acc), whole, several, piece_start(piece, R), D, G,
                ROWS,
            )  # fmt: skip
    elif whole:
        weight, alpha, m = present_weight(Q + q_row, K_PRESENT, m, scale_log2, G, D, CAP)
        total = with_sinks(total * alpha + weight, m, SINKS, head * G + g, g < G)
        for piece in tl.static_range(len(sums)):
            # The present token is added to these dims of the output, [dims, query heads].
            d = tl.arange(0, sums[piece].shape[0])[None, :]
            v = tl.load(V_PRESENT + piece_start(piece, R) + d).to(tl.float32)
            acc = tl.trans(sums[piece]) * alpha[:, None] + weight[:, None] * v
            at = OUT + g[:, None] * D + piece_start(piece, R) + d
            tl.store(at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=g_ok)
    else:
        out = slot * G + g
        part = PART + out[:, None] * D
        for piece in tl.static_range(len(sums)):
            d = tl.arange(0, sums[piece].shape[0])[None, :]
            tl.store(part + piece_start(piece, R) + d, tl.trans(sums[piece] / total[None, :]), mask=g_ok)
        tl.store(LSE + out, m + tl.log2(total), mask=g < G)


@triton.jit(do_not_specialize=["rows", "stripe"], do_not_specialize_on_alignment=["TABLE", "SLOTS", "POSITIONS", "CUM"])
def _decode_kernel(
    Q, K, V, ARENA, TABLE, SLOTS, POSITIONS, CUM, COS, SIN, W, PART, LSE, OUT, SINKS, rows, kv_heads, q_stride,
    k_stride, v_stride, out_stride, table_stride, columns, stripe, k_offset, v_offset, k_scales, v_scales,
    k_layer_scale, v_layer_scale, scale_log2, reach, D: tl.constexpr, R: tl.constexpr, P: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr, STRIPES: tl.constexpr, RING: tl.constexpr,
    CHUNKED: tl.constexpr, DTYPE: tl.constexpr, CODE: tl.constexpr, PER_ROW: tl.constexpr, ROW: tl.constexpr,
    TILE: tl.constexpr, MAX_ROWS: tl.constexpr, GROUP_ROWS: tl.constexpr, CAP: tl.constexpr, PDL: tl.constexpr,
    ROWS: tl.constexpr = 1,
):  # fmt: skip
    """One program's share of the line, item by item. R > 0 means a latent. ROWS > 1 means segments of at most so many
    rows, which are given in the place of slots.

    Where the past lies was known before this layer: it is looked up while heads are still made ready.
    """
    program = tl.program_id(0)
    all_rows = tl.arange(0, MAX_ROWS)
    row_ok = all_rows < rows
    ends = tl.load(CUM + 1 + all_rows, mask=row_ok, other=0) * kv_heads
    total = tl.load(CUM + rows) * kv_heads
    share = share_of(total, tl.num_programs(0))
    unit = program * share
    stop = tl.minimum(unit + share, total)
    while unit < stop:
        row = tl.sum(((ends <= unit) & row_ok).to(tl.int32))  # rows that end before this unit; empty ones among them
        before = tl.load(CUM + row)
        tiles = tl.load(CUM + row + 1) - before
        inside = unit - before * kv_heads
        head = inside // tiles
        tile = inside % tiles
        count = tl.minimum(tiles - tile, stop - unit)
        if ROWS > 1:
            sequence = SLOTS + row * FIELDS  # a segment, whose first field is the slot
            past = tl.load(sequence + 1)
            asking = tl.load(sequence + 5)
            position = tl.load(sequence + 2) - asking
            present_row = tl.load(sequence + 3)
            query_row = tl.load(sequence + 4)
            several = (asking * G, position, reach, q_stride, out_stride, k_stride, v_stride)
        else:
            sequence = SLOTS + row
            past = tl.load(POSITIONS + row)
            position = past
            present_row = row
            query_row = row
            several = ()
        first = first_visible(position, reach, CHUNKED)
        lo = (first // TILE + tile) * TILE
        hi = tl.minimum(lo + count * TILE, past)
        if ROWS > 1:
            lo = tl.minimum(lo, past)  # an item may be the present alone
        base = ring_base(first, columns, P, RING)
        table = TABLE + tl.load(sequence).to(tl.int64) * table_stride + stripe
        q_row = query_row.to(tl.int64) * q_stride + head * G * D
        slot = 2 * program + (unit != program * share) if ROWS > 1 else program + row * kv_heads + head
        k_present = K + present_row.to(tl.int64) * k_stride + head * D
        v_present = V + present_row.to(tl.int64) * v_stride + head * D
        o_row = OUT + query_row.to(tl.int64) * out_stride + head * G * D
        is_last = tile + count == tiles
        if PDL:
            if unit == program * share:
                _ask_for(
                    ARENA, table, head, lo, first, past, base, columns, k_offset, v_offset, P, STRIPES, RING, TILE,
                    (ROW if CODE > 0 else D) * 2, R == 0,
                )  # fmt: skip
            gdc_wait()
            gdc_launch_dependents()
        if CODE > 0 and R > 0:
            coded_latent_item(
                Q, ARENA, table, COS, SIN, W, PART, LSE, slot, head, lo, hi, first, past, base, q_row, columns,
                k_offset, k_scales, k_layer_scale, scale_log2, count == tiles, k_present, v_present, o_row, SINKS,
                is_last, several, D, R, P, G, N, ROW, STRIPES, RING, CODE, PER_ROW, DTYPE, GROUP_ROWS, CAP, ROWS,
                CHUNKED,
            )  # fmt: skip
        elif CODE > 0:
            coded_pair_item(
                Q, ARENA, table, PART, LSE, slot, head, lo, hi, first, past, base, q_row, columns, k_offset, v_offset,
                k_scales, v_scales, k_layer_scale, v_layer_scale, scale_log2, count == tiles, k_present, v_present,
                o_row, SINKS, is_last, several, D, P, G, N, ROW, STRIPES, RING, CODE, PER_ROW, DTYPE, GROUP_ROWS, CAP,
                ROWS, CHUNKED,
            )  # fmt: skip
        elif R > 0:
            _latent_item(
                Q, ARENA, table, COS, SIN, W, PART, LSE, slot, head, lo, hi, first, past, base, q_row, columns,
                k_offset, scale_log2, count == tiles, k_present, v_present, o_row, SINKS, is_last, several, D, R, P, G,
                N, UNIT, STRIPES, RING, DTYPE, GROUP_ROWS, CAP, ROWS, CHUNKED,
            )  # fmt: skip
        else:
            _pair_item(
                Q, ARENA, table, PART, LSE, slot, head, lo, hi, first, past, base, q_row, columns, k_offset, v_offset,
                scale_log2, count == tiles, k_present, v_present, o_row, SINKS, is_last, several, D, P, G, N, UNIT,
                STRIPES, RING, DTYPE, GROUP_ROWS, CAP, ROWS, CHUNKED,
            )  # fmt: skip
        unit += count
    if PDL:  # even without a share: when this launch ends, all before it have ended
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _ask_for(
    ARENA, table, head, lo, first, past, base, columns, k_offset, v_offset, P: tl.constexpr, STRIPES: tl.constexpr,
    RING: tl.constexpr, TILE: tl.constexpr, ROW_BYTES: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Have a tile brought to L2, before anybody can attend it."""
    t = lo + tl.arange(0, TILE)
    ok = (t >= first) & (t < past)
    page = tl.load(table + column_of(t, base, columns, P, RING) * STRIPES, mask=ok, other=0).to(tl.int64)
    LINES: tl.constexpr = triton.next_power_of_2((ROW_BYTES + LINE_BYTES - 1) // LINE_BYTES)
    line = tl.minimum(tl.arange(0, LINES) * LINE_BYTES, ROW_BYTES - 1)
    at = ARENA + (page * UNIT_BYTES + (head * P + t % P) * ROW_BYTES)[:, None] + line[None, :]
    _prefetch(at + k_offset)
    if PAIR:
        _prefetch(at + v_offset)


@triton.jit
def _prefetch(at):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
