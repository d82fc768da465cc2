"""Prefill attention for 512-dim heads on Hopper (Gluon): past from pages, present from activations.

One program owns 64 rows: the query heads of one KV head times as many tokens as that leaves. Its output, 64 x 512 in
float32, fills two warp groups (256 dims each, 128 registers a thread). A third one has the scores: while it computes a
softmax or the scores of the next tile, the two multiply the probabilities of the last one by their dims of V. One tile
of 64 tokens x 512 dims serves as K for one and as V for the others. Four more warps bring tiles in by TMA and look
pages up ahead of time.

Latent: the tile is n. K differs from it only in the 128 rotary dims, which come rotated from a scratch buffer
(`prepare.rotate_keys`); w of the other 384 dims is folded into q. Pair: K and V are two tiles, each with one buffer
instead of two.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from windowpane.attention.hopper.rescale import rescaled
from windowpane.attention.hopper.tiles import (
    EDGES,
    copy_from_page,
    copy_quarter,
    load_entry,
    segment_of,
    store_rows,
    tile_of,
)


@gluon.jit
def _copy_tile(
    source, entry, head, kv_heads, j, held, bar, tiles, buf, which: gl.constexpr, BLOCK_TOKENS: gl.constexpr
):
    """Producer `which`'s quarter of tile j. An arena row is 4 x 256 bytes."""
    arena, edges, present = source
    start, stop, first_row, first_edge = held
    at = j * 64
    if (at >= start) & (at + 64 <= stop):
        copy_quarter(present, first_row + at, head * 512, bar, tiles, buf, which)
    elif at + 64 > start:
        edge = first_edge + gl.where(at < start, 1, 2)
        copy_quarter(edges, (edge * kv_heads + head) * 64, 0, bar, tiles, buf, which)
    else:
        copy_from_page(arena, entry, 4, head * BLOCK_TOKENS, bar, tiles, buf, which, BLOCK_TOKENS)


@gluon.jit
def _produce(
    which: gl.constexpr, sources, buffers, bars, place, BLOCK_TOKENS: gl.constexpr, STRIPES: gl.constexpr,
    LATENT: gl.constexpr,
):  # fmt: skip
    q, keys, values, rotated, table = sources
    q_box, tiles, rotated_tile = buffers
    head, kv_heads, first_row, _first_query, n_tiles, held, columns, first_rotated = place
    start = held[0]
    GROUP: gl.constexpr = q_box.type.shape[1]
    PAGES: gl.constexpr = 64 // BLOCK_TOKENS
    PAGE: gl.constexpr = which * PAGES // 4
    q_full, full, empty, rotated_full, rotated_empty = bars
    if which == 0:
        mbarrier.expect(q_full, 64 * 512 * 2)
        tma.async_copy_global_to_shared(q, [first_row, head * GROUP, 0], q_full, q_box)
    entry = load_entry(table, PAGE, start >= 64, columns, STRIPES)
    for j in range(n_tiles):
        # the entry of the next tile is on its way while this one waits for a free buffer
        next_entry = load_entry(table, (j + 1) * PAGES + PAGE, (j + 2) * 64 <= start, columns, STRIPES)
        if LATENT:
            buf = j % 2
            mbarrier.wait(empty.index(buf), (j // 2 & 1) ^ 1)
            _copy_tile(keys, entry, head, kv_heads, j, held, full.index(buf), tiles, buf, which, BLOCK_TOKENS)
            if which == 0:
                mbarrier.wait(rotated_empty, (j & 1) ^ 1)
                mbarrier.expect(rotated_full, 64 * 128 * 2)
                tma.async_copy_global_to_shared(rotated, [first_rotated + j * 64, 0], rotated_full, rotated_tile)
        else:
            mbarrier.wait(empty.index(0), (j & 1) ^ 1)
            _copy_tile(keys, entry, head, kv_heads, j, held, full.index(0), tiles, 0, which, BLOCK_TOKENS)
            mbarrier.wait(empty.index(1), (j & 1) ^ 1)
            _copy_tile(values, entry, head, kv_heads, j, held, full.index(1), tiles, 1, which, BLOCK_TOKENS)
        entry = next_entry


@gluon.jit
def _fold_weights(q_box, q_full, W):
    """Once q is there, multiply its dims that do not rotate by the key norm's weight, where they lie."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    parts = q_box._reinterpret(gl.bfloat16, [4, 64, 128], shared)
    at = W + gl.arange(0, 128, gl.SliceLayout(0, layout))
    weights = (gl.load(at + 128), gl.load(at + 256), gl.load(at + 384))
    mbarrier.wait(q_full, 0)
    for i in gl.static_range(3):
        x = parts.index(i + 1).load(layout).to(gl.float32) * weights[i][None, :]
        parts.index(i + 1).store(x.to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def _scores(q, rotated_tile, tiles, bars, j, LATENT: gl.constexpr):
    """q.K of tile j, once it is there. Latent: rotary dims from the rotated tile, the others from the latent."""
    _q_full, full, empty, rotated_full, rotated_empty = bars
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    s = gl.full([64, 64], 0.0, gl.float32, score)
    # j >> 30 is 0, but only we know: an address that changes from tile to tile is computed when needed, while the
    # compiler would keep the 32 matrix descriptors of a fixed one in 64 registers
    zero = j >> 30
    if LATENT:
        buf = j % 2
        q128 = q._reinterpret(gl.bfloat16, [4, 64, 128], shared)
        q256 = q._reinterpret(gl.bfloat16, [2, 64, 256], shared)
        tiles128 = tiles._reinterpret(gl.bfloat16, [8, 64, 128], shared)
        tiles256 = tiles._reinterpret(gl.bfloat16, [4, 64, 256], shared)
        mbarrier.wait(full.index(buf), j // 2 & 1)
        s = warpgroup_mma(
            q128.index(zero * 4 + 1), tiles128.index(buf * 4 + 1).permute((1, 0)), s, use_acc=False, is_async=True
        )
        s = warpgroup_mma(q256.index(zero * 2 + 1), tiles256.index(buf * 2 + 1).permute((1, 0)), s, is_async=True)
        mbarrier.wait(rotated_full, j & 1)
        s = warpgroup_mma(q128.index(zero * 4), rotated_tile.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(rotated_empty, count=1)
    else:
        mbarrier.wait(full.index(0), j & 1)
        q512 = q._reinterpret(gl.bfloat16, [1, 64, 512], shared)
        s = warpgroup_mma(q512.index(zero), tiles.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(empty.index(0), count=1)
    return s


@gluon.jit
def _softmax(s, m, norm, position, first_query, j, scale_log2):
    """Mask, then one step of the running softmax."""
    # most tiles are seen whole by all rows
    if j * 64 + 63 > first_query:
        key = j * 64 + gl.arange(0, 64, gl.SliceLayout(0, s.type.layout))
        s = gl.where(key[None, :] > position[:, None], float("-inf"), s)
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    alpha = gl.exp2(m - m_new)
    p = gl.exp2(s * scale_log2 - m_new[:, None])
    return p.to(gl.bfloat16), m_new, norm * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _weigh(W, shares, buffers, bars, place, scale_log2, LATENT: gl.constexpr):
    """What 64 rows, which `q_box` [tokens, heads, dims] holds, give to each tile's tokens: its probabilities, by how
    much what came before shrinks, and in the end the sums of all probabilities.

    The first row is at position `first_query`.
    """
    q_box, tiles, rotated_tile = buffers
    _head, _kv_heads, _first_row, first_query, n_tiles, _held, _columns, _first_rotated = place
    probs, shrinks, norms, p_full, p_empty, ended, _stored = shares
    GROUP: gl.constexpr = q_box.type.shape[1]
    row: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    q = q_box._reinterpret(gl.bfloat16, [64, 512], gl.NVMMASharedLayout(128, 16, rank=2))
    if LATENT:
        _fold_weights(q_box, bars[0], W)
    else:
        mbarrier.wait(bars[0], 0)
    position = first_query + gl.arange(0, 64, row) // GROUP
    m = gl.full([64], -1e30, gl.float32, row)
    norm = gl.full([64], 0.0, gl.float32, row)
    for j in range(n_tiles):
        s = _scores(q, rotated_tile, tiles, bars, j, LATENT)
        p, m, norm, alpha = _softmax(s, m, norm, position, first_query, j, scale_log2)
        buf = j % 2
        mbarrier.wait(p_empty.index(buf), (j // 2 & 1) ^ 1)
        probs.index(buf).store(p)
        shrinks.index(buf).store(alpha)
        fence_async_shared()
        mbarrier.arrive(p_full.index(buf), count=1)
    norms.store(norm)
    mbarrier.arrive(ended, count=1)


@gluon.jit
def _gather(
    which: gl.constexpr, out, OUT, shares, buffers, bars, place, OUT_STRIDE: gl.constexpr, LATENT: gl.constexpr
):
    """256 dims of the output, which takes the place of q in the end. Rows from `stop` on are another segment's."""
    q_box, tiles, _rotated_tile = buffers
    head, _kv_heads, first_row, first_query, n_tiles, held, _columns, _first_rotated = place
    probs, shrinks, norms, p_full, p_empty, ended, stored = shares
    _q_full, full, empty, _rotated_full, _rotated_empty = bars
    GROUP: gl.constexpr = q_box.type.shape[1]
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    # with four warp groups, no instruction may have the 256 dims of one as its result
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    row: gl.constexpr = gl.SliceLayout(1, output)
    values = tiles._reinterpret(gl.bfloat16, [8, 64, 128], shared)
    o0 = gl.full([64, 128], 0.0, gl.float32, output)
    o1 = gl.full([64, 128], 0.0, gl.float32, output)
    for j in range(n_tiles):
        share = j % 2
        buf = share if LATENT else 1
        mbarrier.wait(p_full.index(share), j // 2 & 1)
        alpha = shrinks.index(share).load(row)
        o0 = rescaled(o0, alpha)
        o1 = rescaled(o1, alpha)
        mbarrier.wait(full.index(buf), (j // 2 if LATENT else j) & 1)
        o0 = warpgroup_mma(probs.index(share), values.index(buf * 4 + which * 2), o0, is_async=True)
        o1 = warpgroup_mma(probs.index(share), values.index(buf * 4 + which * 2 + 1), o1, is_async=True)
        o0, o1 = warpgroup_mma_wait(0, deps=[o0, o1])
        mbarrier.arrive(empty.index(buf), count=1)
        mbarrier.arrive(p_empty.index(share), count=1)
    mbarrier.wait(ended, 0)
    norm = norms.load(row)[:, None]
    y0 = (o0 / norm).to(gl.bfloat16)
    y1 = (o1 / norm).to(gl.bfloat16)
    tokens = held[1] - first_query
    if tokens * GROUP >= 64:
        halves = q_box._reinterpret(gl.bfloat16, [4, 64, 128], shared)
        halves.index(which * 2).store(y0)
        halves.index(which * 2 + 1).store(y1)
        fence_async_shared()
        mbarrier.arrive(stored, count=1)
        if which == 0:
            mbarrier.wait(stored, 0)
            tma.async_copy_shared_to_global(out, [first_row, head * GROUP, 0], q_box)
            tma.store_wait(0)
    else:
        store_rows(OUT, OUT_STRIDE, y0, first_row, head * GROUP, which * 256, tokens, GROUP, 512)
        store_rows(OUT, OUT_STRIDE, y1, first_row, head * GROUP, which * 256 + 128, tokens, GROUP, 512)


@gluon.jit(
    do_not_specialize=["table_stride", "stripe", "columns", "kv_heads", "rotated_rows"],
    do_not_specialize_on_alignment=["TABLE", "SEGMENTS", "MEMBERS", "TILES"],
)
def wide_kernel(
    q, out, OUT, k_arena, v_arena, k_edges, v_edges, k_present, v_present, rotated, W, TABLE, SEGMENTS, MEMBERS, TILES,
    table_stride, stripe, columns, kv_heads, rotated_rows, scale_log2, OUT_STRIDE: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr, STRIPES: gl.constexpr, LATENT: gl.constexpr,
):  # fmt: skip
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    TOKENS: gl.constexpr = 64 // GROUP
    # the heads of a row block side by side
    head = gl.program_id(0) % kv_heads
    member, block = tile_of(TILES, gl.program_id(0) // kv_heads)
    slot, start, stop, row, q_row, q_count, first_rotated = segment_of(SEGMENTS, MEMBERS, member)
    first_query = stop - q_count + block * TOKENS
    n_tiles = (gl.minimum(first_query + TOKENS, stop) + 63) // 64
    table = TABLE + slot.to(gl.int64) * table_stride + stripe

    q_box = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, GROUP, 512], gl.NVMMASharedLayout(128, 16, rank=3))
    probs = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], shared)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], shared)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    rotated_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 128], shared)
    shrinks = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    norms = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    rotated_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    rotated_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ended = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=4)  # four producers
        # what both halves of the output read; a pair's K is for the scores alone
        mbarrier.init(empty.index(i), count=2 if LATENT or i == 1 else 1)
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=2)
    mbarrier.init(q_full, count=1)
    mbarrier.init(rotated_full, count=1)
    mbarrier.init(rotated_empty, count=1)
    mbarrier.init(ended, count=1)
    mbarrier.init(stored, count=2)
    bars = (q_full, full, empty, rotated_full, rotated_empty)
    sources = (q, (k_arena, k_edges, k_present), (v_arena, v_edges, v_present), rotated, table)
    buffers, shares = (q_box, tiles, rotated_tile), (probs, shrinks, norms, p_full, p_empty, ended, stored)
    held = (start, stop, row - start, member * EDGES)
    first_rotated += head * rotated_rows
    place = (head, kv_heads, q_row + block * TOKENS, first_query, n_tiles, held, columns, first_rotated)
    gl.warp_specialize(
        [
            (_weigh, (W, shares, buffers, bars, place, scale_log2, LATENT)),
            (_gather, (0, out, OUT, shares, buffers, bars, place, OUT_STRIDE, LATENT)),
            (_gather, (1, out, OUT, shares, buffers, bars, place, OUT_STRIDE, LATENT)),
            (_produce, (0, sources, buffers, bars, place, BLOCK_TOKENS, STRIPES, LATENT)),
            (_produce, (1, sources, buffers, bars, place, BLOCK_TOKENS, STRIPES, LATENT)),
            (_produce, (2, sources, buffers, bars, place, BLOCK_TOKENS, STRIPES, LATENT)),
            (_produce, (3, sources, buffers, bars, place, BLOCK_TOKENS, STRIPES, LATENT)),
        ],
        [4, 4, 1, 1, 1, 1], [168, 168, 24, 24, 24, 24],
    )  # fmt: skip
