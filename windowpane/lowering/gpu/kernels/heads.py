"""From one fused projection to queries, keys and values: norms, rotation, and the way into pages, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.attention.triton.codes import INT4, encode, to_basis
from windowpane.attention.triton.view import ELEMENTS, LayerView, rotate, section
from windowpane.attention.triton.write import CodedRows
from windowpane.kv.layout import OFFSET_UNIT_BYTES

# Values and warps per program: with 16 values a thread, both halves of a head come in 16-byte loads. A lone row waits
# for instructions rather than for values (docs/performance.md), and with more warps there are fewer.
VALUES, WARPS, LONE_WARPS = 1024, 2, 4


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Where a layer stores what it makes: `table` is the group's for writing, int32 [slots, width, stripes].

    Of every `unseen_every` tokens the last is seen by none after it (a chunk's last): it may have no page, and is not
    stored. 0 where all are seen.
    """

    arena: torch.Tensor
    table: torch.Tensor
    view: LayerView
    unseen_every: int = 0

    def arguments(self, slots: torch.Tensor | None) -> tuple[Any, ...]:
        """As the kernel takes them."""
        view = self.view
        numbers = (self.table.shape[1], view.columns, view.stripe, view.stripes, view.block_tokens)
        offsets = view.data_offsets[0], view.data_offsets[-1], *view.scales_at()
        return self.arena, self.table, slots, *numbers, *offsets


_NOWHERE = (None, None, None, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def prepare_heads(
    projected: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    *, v_norm: bool, angles: tuple[torch.Tensor, torch.Tensor] | None, pair_distance: int, eps: float, latent: bool,
    page_write: PageWrite | None = None, slots: torch.Tensor | None = None, view: LayerView | None = None,
    coded: CodedRows | None = None, balance: torch.Tensor | None = None, transform_values: bool = False,
    pdl: bool = False,
) -> None:  # fmt: skip
    """Fill q [rows, query heads, dim], k and v [rows, KV heads, dim] from `projected` [rows, all heads × dim].

    Heads lie in that order: queries, then keys and values, or one latent for both. q or k and v may have no heads.
    `angles` are cos and sin, float32 [positions, R]: dims [0, R) rotate with those `pair_distance` further. Of a
    latent, v is its norm in v's dtype and k is rebuilt from that, as past keys are from pages.

    With `page_write`, row i is stored in slot `slots[i]` too. A row at position -1 is padding: it is stored nowhere.

    Where the layer's `view` is coded, K and V (or the latent) come out as they are once coded and decoded, and what was
    coded goes to pages or else to `coded`. Where the view has a basis, queries and keys are balanced and transformed
    here, values only with `transform_values`: weights can do it for them.

    `pdl` lets the launch begin while the one before it ends, and look up positions, slots and pages by then: between
    whoever wrote those and this there must be a plain launch.
    """
    rows, query_heads, dim = q.shape
    kv_heads = k.shape[1]
    pairs = 0 if angles is None else angles[0].shape[1]
    distance = pair_distance if pairs else dim // 2
    if dim & (dim - 1) or dim % (2 * distance) or pairs > distance:
        raise ValueError(f"heads of {dim} dims with {pairs} rotary pairs {distance} apart have no kernel")
    cos, sin = (None, None) if angles is None else angles
    heads = max(1, VALUES // dim)
    query_parts, kv_parts = triton.cdiv(query_heads, heads), triton.cdiv(kv_heads, heads)
    # Queries alone code nothing, whatever their layer's view.
    code = view.code if view and kv_heads else 0
    layer_scales, row_words = (view.layer_scales, view.row_words) if view else ((1.0,), 0)
    buffers = (None,) * 4 if coded is None else (coded.k, coded.v, coded.k_scales, coded.v_scales)
    _heads_kernel[(rows, query_parts + kv_parts * (1 if latent else 2))](
        projected, positions, q_norm, k_norm, cos, sin, q, k, v, projected.stride(0),
        pairs if cos is None else cos.stride(0), q.stride(0), k.stride(0), v.stride(0), eps,
        *(_NOWHERE if page_write is None else page_write.arguments(slots)),
        *buffers, layer_scales[0], layer_scales[-1], balance,
        QUERY_HEADS=query_heads, KV_HEADS=kv_heads, DIM=dim, PAIRS=pairs, DISTANCE=distance, HEADS=heads, V_NORM=v_norm,
        LATENT=latent, UNIT_BYTES=OFFSET_UNIT_BYTES, KV_DTYPE=ELEMENTS[k.dtype], CODE=code,
        PER_ROW=view is not None and bool(view.scale_offsets), ROW=row_words, WORDS=dim // (4 if code == INT4 else 2),
        GROUP=max(query_heads // view.kv_heads, 1) if view else 1, BALANCED_HEADS=view.kv_heads if view else 0,
        TRANSFORM_VALUES=transform_values, UNSEEN_EVERY=page_write.unseen_every if page_write else 0, PDL=pdl,
        num_warps=LONE_WARPS if rows == 1 else WARPS, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _load_pairs(at, mask, DISTANCE: tl.constexpr, STAY: tl.constexpr = False):
    """float32: the first of each pair of dims, and the second. They may stay in L2 while layers' weights go past."""
    POLICY: tl.constexpr = "evict_last" if STAY else ""
    low = tl.load(at, mask=mask, other=0.0, eviction_policy=POLICY)
    high = tl.load(at + DISTANCE, mask=mask, other=0.0, eviction_policy=POLICY)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _store_pairs(at, low, high, mask, DISTANCE: tl.constexpr, DTYPE: tl.constexpr):
    tl.store(at, low.to(DTYPE), mask=mask)
    tl.store(at + DISTANCE, high.to(DTYPE), mask=mask)


@triton.jit
def _rounded(low, high, DTYPE: tl.constexpr):
    return low.to(DTYPE).to(tl.float32), high.to(DTYPE).to(tl.float32)


@triton.jit
def _normed(low, high, WEIGHT, dims, mask, DIM: tl.constexpr, DISTANCE: tl.constexpr, eps, DTYPE: tl.constexpr):
    if WEIGHT is not None:  # on their way while the squares are summed
        low_weight, high_weight = _load_pairs(WEIGHT + dims, mask, DISTANCE, True)
    squares = tl.sum(tl.sum(low * low + high * high, 2), 1)
    scale = tl.rsqrt(squares / DIM + eps)[:, None, None]
    low *= scale
    high *= scale
    if WEIGHT is not None:
        low *= low_weight
        high *= high_weight
    return _rounded(low, high, DTYPE)


@triton.jit
def _row(low, high, DIM: tl.constexpr):
    """Heads [heads, pieces, distance] and their other halves as rows [heads, DIM]."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), [low.shape[0], DIM])


@triton.jit
def _halves(row, PIECES: tl.constexpr, DISTANCE: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(row, [row.shape[0], PIECES, 2, DISTANCE]), (0, 1, 3, 2)))


@triton.jit
def _balanced(low, high, factors, inside, DIM: tl.constexpr, PIECES: tl.constexpr, DISTANCE: tl.constexpr):
    """Queries or keys into the basis that keys are coded in."""
    low_factor, high_factor = _load_pairs(factors, inside, DISTANCE)
    return _halves(to_basis(_row(low * low_factor, high * high_factor, DIM), DIM), PIECES, DISTANCE)


@triton.jit
def _coded(
    low, high, WORDS_AT, SCALES_AT, lines, layer_scale, DIM: tl.constexpr, WORDS: tl.constexpr, CODE: tl.constexpr,
    PER_ROW: tl.constexpr,
):  # fmt: skip
    """Store heads as words and scales, at these lines; returns what they then are."""
    words_at, place, ok = lines
    words, bits, decoded = encode(_row(low, high, DIM), layer_scale, DIM, WORDS, CODE, PER_ROW)
    w = tl.arange(0, WORDS)[None, :]
    tl.store(WORDS_AT + words_at[:, None] + w, words.to(tl.int16), mask=ok[:, None])
    if PER_ROW:
        tl.store(SCALES_AT + place, bits, mask=ok)
    return _halves(decoded, low.shape[1], low.shape[2])


@triton.jit(
    do_not_specialize=["table_width", "columns", "stripe", "stripes", "block_tokens"],
    do_not_specialize_on_alignment=["POSITIONS", "SLOTS", "TABLE"],
)
def _heads_kernel(
    X, POSITIONS, Q_NORM, K_NORM, COS, SIN, Q, K, V, x_stride, angle_stride, q_stride, k_stride, v_stride, eps,
    ARENA, TABLE, SLOTS, table_width, columns, stripe, stripes, block_tokens, k_offset, v_offset, k_scales, v_scales,
    K_WORDS, V_WORDS, K_SCALES, V_SCALES, k_layer_scale, v_layer_scale, BALANCE,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, DISTANCE: tl.constexpr,
    HEADS: tl.constexpr, V_NORM: tl.constexpr, LATENT: tl.constexpr, UNIT_BYTES: tl.constexpr, KV_DTYPE: tl.constexpr,
    CODE: tl.constexpr, PER_ROW: tl.constexpr, ROW: tl.constexpr, WORDS: tl.constexpr,
    GROUP: tl.constexpr, BALANCED_HEADS: tl.constexpr, TRANSFORM_VALUES: tl.constexpr, UNSEEN_EVERY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A few heads of one row: of queries, keys (or latents) or values.

    Heads come as [heads, pieces, DISTANCE], once for the first and once for the second dims of pairs. A piece is two
    pair distances wide; only the first has dims that rotate.
    """
    if PDL:
        gdc_launch_dependents()
    DTYPE: tl.constexpr = X.dtype.element_ty
    QUERY_PARTS: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    PIECES: tl.constexpr = DIM // (2 * DISTANCE)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    is_query = part < QUERY_PARTS
    is_value = part >= QUERY_PARTS + KV_PARTS
    kind_part = part - tl.where(is_query, 0, tl.where(is_value, QUERY_PARTS + KV_PARTS, QUERY_PARTS))
    kind_head = tl.where(is_query, 0, tl.where(is_value, QUERY_HEADS + KV_HEADS, QUERY_HEADS))
    head = (kind_part * HEADS + tl.arange(0, HEADS))[:, None, None]
    inside = head < tl.where(is_query, QUERY_HEADS, KV_HEADS)
    pieces = tl.arange(0, PIECES)[:, None] * (2 * DISTANCE)
    # Weights and angles are loaded in the shape of heads, so that each thread has its own at hand.
    dims = tl.broadcast_to((pieces + tl.arange(0, DISTANCE)[None, :])[None], [HEADS, PIECES, DISTANCE])
    at = head * DIM + dims

    # Where a row goes and how it rotates was known before this layer: it is looked up while the projection is made.
    position = tl.load(POSITIONS + row)
    is_stored = position >= 0
    if UNSEEN_EVERY > 0:
        is_stored = is_stored & ((position + 1) % UNSEEN_EVERY != 0)
    position = tl.maximum(position, 0)
    if PAIRS > 0:
        place = position.to(tl.int64) * angle_stride
        cos = tl.load(COS + place + dims, mask=dims < PAIRS, other=1.0)
        sin = tl.load(SIN + place + dims, mask=dims < PAIRS, other=0.0)
    if ARENA is not None:
        slot = tl.load(SLOTS + row, mask=is_stored, other=0).to(tl.int64)
        entry = TABLE + (slot * table_width + position // block_tokens % columns) * stripes + stripe
        page = tl.load(entry, mask=is_stored, other=0).to(tl.int64) * UNIT_BYTES
        in_page = (head * block_tokens + position % block_tokens) * DIM + dims
    if PDL:
        gdc_wait()
    low, high = _load_pairs(X + row * x_stride + kind_head * DIM + at, inside, DISTANCE)
    if CODE > 0:
        # Where words and scales of these heads go: to their page, or to their row of a buffer.
        line = kind_part * HEADS + tl.arange(0, HEADS)
        line_inside = line < KV_HEADS
        if ARENA is not None:
            line_inside = line_inside & is_stored
            place = line * block_tokens + position % block_tokens
            words_at = place * ROW
            k_words = section(ARENA, page + k_offset, tl.int16)
            v_words = section(ARENA, page + v_offset, tl.int16)
            k_scales_at = section(ARENA, page + k_scales, tl.int32)
            v_scales_at = section(ARENA, page + v_scales, tl.int32)
        else:
            place = row * KV_HEADS + line
            words_at = place * WORDS
            k_words, v_words, k_scales_at, v_scales_at = K_WORDS, V_WORDS, K_SCALES, V_SCALES
        lines = (words_at, place, line_inside)

    if is_query:
        if Q_NORM is not None:
            low, high = _normed(low, high, Q_NORM, dims, inside, DIM, DISTANCE, eps, DTYPE)
        if PAIRS > 0:
            low, high = rotate(low, high, cos, sin)
        if BALANCE is not None:
            low, high = _rounded(low, high, DTYPE)
            low, high = _balanced(low, high, BALANCE + head // GROUP * DIM + dims, inside, DIM, PIECES, DISTANCE)
        _store_pairs(Q + row * q_stride + at, low, high, inside, DISTANCE, DTYPE)
    elif is_value:
        if V_NORM:
            low, high = _normed(low, high, None, dims, inside, DIM, DISTANCE, eps, DTYPE)
        if TRANSFORM_VALUES:
            low, high = _halves(to_basis(_row(low, high, DIM), DIM), PIECES, DISTANCE)
        if CODE > 0:
            low, high = _coded(low, high, v_words, v_scales_at, lines, v_layer_scale, DIM, WORDS, CODE, PER_ROW)
        _store_pairs(V + row * v_stride + at, low, high, inside, DISTANCE, KV_DTYPE)
        if ARENA is not None and CODE == 0:
            values = section(ARENA, page + v_offset, KV_DTYPE)
            _store_pairs(values + in_page, low, high, inside & is_stored, DISTANCE, KV_DTYPE)
    else:
        if LATENT:
            low, high = _normed(low, high, None, dims, inside, DIM, DISTANCE, eps, DTYPE)
            if CODE > 0:
                low, high = _coded(low, high, k_words, k_scales_at, lines, k_layer_scale, DIM, WORDS, CODE, PER_ROW)
            low, high = _rounded(low, high, KV_DTYPE)
            _store_pairs(V + row * v_stride + at, low, high, inside, DISTANCE, KV_DTYPE)
            if ARENA is not None and CODE == 0:
                latents = section(ARENA, page + k_offset, KV_DTYPE)
                _store_pairs(latents + in_page, low, high, inside & is_stored, DISTANCE, KV_DTYPE)
            if K_NORM is not None:
                low_weight, high_weight = _load_pairs(K_NORM + dims, inside, DISTANCE, True)
                low *= low_weight
                high *= high_weight
        elif K_NORM is not None:
            low, high = _normed(low, high, K_NORM, dims, inside, DIM, DISTANCE, eps, DTYPE)
        if PAIRS > 0:
            low, high = rotate(low, high, cos, sin)
        low, high = _rounded(low, high, DTYPE)
        if BALANCE is not None:
            low, high = _balanced(
                low, high, BALANCE + (BALANCED_HEADS + head) * DIM + dims, inside, DIM, PIECES, DISTANCE
            )
            low, high = _rounded(low, high, DTYPE)
        if CODE > 0 and not LATENT:
            low, high = _coded(low, high, k_words, k_scales_at, lines, k_layer_scale, DIM, WORDS, CODE, PER_ROW)
        _store_pairs(K + row * k_stride + at, low, high, inside, DISTANCE, KV_DTYPE)
        if ARENA is not None and not LATENT and CODE == 0:
            keys = section(ARENA, page + k_offset, KV_DTYPE)
            _store_pairs(keys + in_page, low, high, inside & is_stored, DISTANCE, KV_DTYPE)
