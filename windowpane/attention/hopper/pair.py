"""Prefill attention for pairs of 64, 128 and 256 dims on Hopper (Gluon): past from pages, present from activations.

Each of a program's warp groups owns 64 rows with all their output (128 registers a thread at 256 dims) and runs on its
own: while one computes its softmax, another keeps the tensor cores busy. Rows are query heads of one KV head times as
many tokens as that leaves. Heads to a row block are a power of two, so 6 query heads to a KV head are 3 pairs of them.
There are three warp groups at 64 dims, where a softmax takes as long as its products, and two at more. K and V tiles
have two buffers each, filled by a further warp through TMA. Within a warp group, scores of the next tile go to the
tensor cores ahead of P.V of this one.
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
from windowpane.attention.hopper.tiles import EDGES, copy_from_pages, load_entries, segment_of, store_rows, tile_of
from windowpane.attention.triton.view import LOG2E

_LOG2E = gl.constexpr(LOG2E)
_LONG_WINDOW = gl.constexpr(16_384)


@gluon.jit
def _copy_tile(source, entries, head, kv_heads, j, held, edge_tile, bar, buf, BLOCK_TOKENS: gl.constexpr):
    arena, edges, present, tiles = source
    start, stop, first_row, first_edge = held
    TILE: gl.constexpr = tiles.type.shape[1]
    DIM: gl.constexpr = tiles.type.shape[2]
    mbarrier.expect(bar, TILE * DIM * 2)
    at = j * TILE
    if (at >= start) & (at + TILE <= stop):
        tma.async_copy_global_to_shared(present, [first_row + at, head * DIM], bar, tiles.index(buf))
    elif (j == edge_tile) | (at + TILE > start):
        which = gl.where(j == edge_tile, 0, gl.where(at < start, 1, 2))
        row = ((first_edge + which) * kv_heads + head) * TILE
        tma.async_copy_global_to_shared(edges, [row, 0], bar, tiles.index(buf))
    else:
        copy_from_pages(arena, entries, head * BLOCK_TOKENS, bar, tiles, buf, BLOCK_TOKENS)


@gluon.jit
def _produce(q, keys, values, table, q_boxes, bars, place, BLOCK_TOKENS: gl.constexpr, STRIPES: gl.constexpr):
    """`keys` and `values`: pages, edges, the present, and the tiles in shared memory that they are copied to."""
    TILE: gl.constexpr = keys[3].type.shape[1]
    DIM: gl.constexpr = keys[3].type.shape[2]
    TOKENS: gl.constexpr = q_boxes.type.shape[1]
    GROUP: gl.constexpr = q_boxes.type.shape[2]
    PAGES: gl.constexpr = TILE // BLOCK_TOKENS
    q_full, k_full, k_empty, v_full, v_empty = bars
    heads, head, kv_heads, first_row, first_tile, n_tiles, held, edge_tile, columns = place
    start = held[0]
    WARP_GROUPS: gl.constexpr = q_boxes.type.shape[0]
    mbarrier.expect(q_full, WARP_GROUPS * 64 * DIM * 2)
    for i in gl.static_range(WARP_GROUPS):
        tma.async_copy_global_to_shared(q, [first_row + i * TOKENS, heads * GROUP, 0], q_full, q_boxes.index(i))
    entries = load_entries(table, first_tile, (first_tile + 1) * TILE <= start, columns, PAGES, STRIPES)
    for i in range(n_tiles):
        j = first_tile + i
        # entries of the next tile are on their way while this one waits for a free buffer
        next_entries = load_entries(table, j + 1, (j + 2) * TILE <= start, columns, PAGES, STRIPES)
        buf = i % 2
        phase = (i // 2 & 1) ^ 1
        mbarrier.wait(k_empty.index(buf), phase)
        _copy_tile(keys, entries, head, kv_heads, j, held, edge_tile, k_full.index(buf), buf, BLOCK_TOKENS)
        mbarrier.wait(v_empty.index(buf), phase)
        _copy_tile(values, entries, head, kv_heads, j, held, edge_tile, v_full.index(buf), buf, BLOCK_TOKENS)
        entries = next_entries


@gluon.jit
def _softmax(s, m, norm, position, first_query, j, scale_log2, WINDOW: gl.constexpr, TOKENS: gl.constexpr):
    """Mask, then one step of the running softmax."""
    TILE: gl.constexpr = s.type.shape[1]
    at = j * TILE
    # most tiles are seen whole by all tokens of the rows
    if (at + (TILE - 1) > first_query) | (at <= first_query + (TOKENS - 1) - WINDOW):
        key = at + gl.arange(0, TILE, gl.SliceLayout(0, s.type.layout))
        hidden = (key[None, :] > position[:, None]) | (key[None, :] <= position[:, None] - WINDOW)
        s = gl.where(hidden, float("-inf"), s)
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    alpha = gl.exp2(m - m_new)
    p = gl.exp2(s * scale_log2 - m_new[:, None])
    return p.to(gl.bfloat16), m_new, norm * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _attend(q_box, to, tiles, bars, at, seen, WINDOW: gl.constexpr, OUT_STRIDE: gl.constexpr):
    """64 rows, which `q_box` [tokens, heads, dims] holds, and in the end the output.

    The first is of the first head of `heads`, row `first_row` of those that ask, at position `first_query`. Rows of
    positions from `stop` on are another segment's.
    """
    out, OUT, SINKS, heads, stop = to
    first_row, first_query = at
    k_tiles, v_tiles = tiles
    first_tile, n_tiles, scale_log2 = seen
    TILE: gl.constexpr = k_tiles.type.shape[1]
    DIM: gl.constexpr = k_tiles.type.shape[2]
    TOKENS: gl.constexpr = q_box.type.shape[0]
    GROUP: gl.constexpr = q_box.type.shape[1]
    q_full, k_full, k_empty, v_full, v_empty = bars
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    prob: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    score_row: gl.constexpr = gl.SliceLayout(1, score)
    output_row: gl.constexpr = gl.SliceLayout(1, output)

    q = q_box._reinterpret(gl.bfloat16, [1, 64, DIM], gl.NVMMASharedLayout(128, 16, rank=2))
    position = first_query + gl.arange(0, 64, score_row) // GROUP
    if SINKS is not None:
        # A score that every query sees, and that has no value.
        m = gl.load(SINKS + heads * GROUP + gl.arange(0, 64, score_row) % GROUP) * _LOG2E
        norm = gl.full([64], 1.0, gl.float32, score_row)
    else:
        m = gl.full([64], -1e30, gl.float32, score_row)
        norm = gl.full([64], 0.0, gl.float32, score_row)
    zero = gl.full([64, TILE], 0.0, gl.float32, score)
    o = gl.full([64, DIM], 0.0, gl.float32, output)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q.index(0), k_tiles.index(0).permute((1, 0)), zero, use_acc=False)
    mbarrier.arrive(k_empty.index(0), count=1)
    p, m, norm, alpha = _softmax(s, m, norm, position, first_query, first_tile, scale_log2, WINDOW, TOKENS)
    p = gl.convert_layout(p, prob)
    for i in range(n_tiles - 1):
        buf = i % 2
        mbarrier.wait(k_full.index(buf ^ 1), (i + 1) // 2 & 1)
        # i >> 30 is 0, but only we know: a fixed address would tie up registers for its matrix descriptors
        s_next = warpgroup_mma(
            q.index(i >> 30), k_tiles.index(buf ^ 1).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(buf), i // 2 & 1)
        o_next = warpgroup_mma(p, v_tiles.index(buf), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_next])
        mbarrier.arrive(k_empty.index(buf ^ 1), count=1)
        p_next, m, norm, alpha = _softmax(
            s, m, norm, position, first_query, first_tile + i + 1, scale_log2, WINDOW, TOKENS
        )
        p_next = gl.convert_layout(p_next, prob)
        o, p = warpgroup_mma_wait(0, deps=[o_next, p])
        p = p_next
        mbarrier.arrive(v_empty.index(buf), count=1)
        shrink = gl.convert_layout(alpha, output_row)
        # Few dims take as long to multiply as to ask about, and a window has few tiles behind its largest score.
        o = rescaled(o, shrink) if DIM > 64 and WINDOW >= _LONG_WINDOW else o * shrink[:, None]
    last = n_tiles - 1
    mbarrier.wait(v_full.index(last % 2), last // 2 & 1)
    o = warpgroup_mma(p, v_tiles.index(last % 2), o)
    o = (o / gl.convert_layout(norm, output_row)[:, None]).to(gl.bfloat16)
    if first_query + TOKENS <= stop:
        q.index(0).store(o)
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [first_row, heads * GROUP, 0], q_box)
        tma.store_wait(0)
    else:
        store_rows(OUT, OUT_STRIDE, o, first_row, heads * GROUP, 0, stop - first_query, GROUP, DIM)


@gluon.jit(
    do_not_specialize=["table_stride", "stripe", "columns", "kv_heads", "parts"],
    do_not_specialize_on_alignment=["TABLE", "SEGMENTS", "MEMBERS", "TILES"],
)
def pair_kernel(
    q, out, OUT, SINKS, k_arena, v_arena, k_edges, v_edges, k_present, v_present, TABLE, SEGMENTS, MEMBERS, TILES,
    table_stride, stripe, columns, kv_heads, parts, scale_log2, WINDOW: gl.constexpr, OUT_STRIDE: gl.constexpr,
    GROUP: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, BLOCK_TOKENS: gl.constexpr, STRIPES: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
):  # fmt: skip
    """GROUP query heads to a row block, and `parts` times as many to a KV head."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    TOKENS: gl.constexpr = 64 // GROUP  # of each warp group
    # the heads of a row block side by side
    side_by_side = kv_heads * parts
    heads = gl.program_id(0) % side_by_side
    member, block = tile_of(TILES, gl.program_id(0) // side_by_side)
    slot, start, stop, row, q_row, q_count, _ = segment_of(SEGMENTS, MEMBERS, member)
    first_row = q_row + block * (WARP_GROUPS * TOKENS)
    first_query = stop - q_count + block * (WARP_GROUPS * TOKENS)
    first_held = gl.maximum(start - WINDOW + 1, 0)
    edge_tile = gl.where(first_held % TILE == 0, -1, first_held // TILE)
    last_query = gl.minimum(first_query + WARP_GROUPS * TOKENS, stop) - 1
    first_tile = gl.maximum(first_query - WINDOW + 1, 0) // TILE
    n_tiles = last_query // TILE + 1 - first_tile
    table = TABLE + slot.to(gl.int64) * table_stride + stripe

    boxes: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    q_boxes = gl.allocate_shared_memory(gl.bfloat16, [WARP_GROUPS, TOKENS, GROUP, DIM], boxes)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, DIM], shared)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, DIM], shared)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=WARP_GROUPS)  # each reads every tile
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=WARP_GROUPS)
    bars = (q_full, k_full, k_empty, v_full, v_empty)
    keys, values = (k_arena, k_edges, k_present, k_tiles), (v_arena, v_edges, v_present, v_tiles)
    held = (start, stop, row - start, member * EDGES)
    place = (heads, heads // parts, kv_heads, first_row, first_tile, n_tiles, held, edge_tile, columns)
    to = (out, OUT, SINKS, heads, stop)
    tiles, seen = (k_tiles, v_tiles), (first_tile, n_tiles, scale_log2)
    first_at, second_at = (first_row, first_query), (first_row + TOKENS, first_query + TOKENS)
    if WARP_GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (q_boxes.index(0), to, tiles, bars, first_at, seen, WINDOW, OUT_STRIDE)),
                (_attend, (q_boxes.index(1), to, tiles, bars, second_at, seen, WINDOW, OUT_STRIDE)),
                (_produce, (q, keys, values, table, q_boxes, bars, place, BLOCK_TOKENS, STRIPES)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        third_at = (first_row + 2 * TOKENS, first_query + 2 * TOKENS)
        gl.warp_specialize(
            [
                (_attend, (q_boxes.index(0), to, tiles, bars, first_at, seen, WINDOW, OUT_STRIDE)),
                (_attend, (q_boxes.index(1), to, tiles, bars, second_at, seen, WINDOW, OUT_STRIDE)),
                (_attend, (q_boxes.index(2), to, tiles, bars, third_at, seen, WINDOW, OUT_STRIDE)),
                (_produce, (q, keys, values, table, q_boxes, bars, place, BLOCK_TOKENS, STRIPES)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
