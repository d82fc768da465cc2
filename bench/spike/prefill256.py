"""Prefill attention for 256-dim heads on Hopper (Gluon): pair, past from pages, present from activations, any window.

One program owns 128 rows: the 2 query heads of one KV head times 64 tokens. Each of two warp groups owns 64 of the rows
with 256 dims of output (128 registers a thread) and runs on its own: while one computes its softmax, the other keeps
the tensor cores busy. K and V tiles of 64 tokens have two buffers each, filled by a ninth warp through TMA. Within a
warp group, scores of the next tile go to the tensor cores ahead of P.V of this one.

Keys are counted from the first held token of the past: past tokens are 0 .. past, present ones follow.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bench.spike.pages import LayerView
from bench.spike.tiles import copy_columns, copy_from_page, load_entry


@gluon.jit
def _copy_tile(
    arena, tail, present, entries, slice_row, tail_row, head, j, past, bar, tiles, buf, BLOCK_TOKENS: gl.constexpr
):
    """All four quarters: 16 boxes a tile are not too many for one warp. An arena row here is 2 x 256 bytes."""
    n_past = (past + 63) // 64
    if j < past // 64:
        for part in gl.static_range(4):
            copy_from_page(
                arena, entries[part], 2, slice_row + head * BLOCK_TOKENS, bar, tiles, buf, part, BLOCK_TOKENS
            )
    elif j < n_past:
        for part in gl.static_range(4):
            copy_columns(tail, tail_row + head * 64, 0, bar, tiles, buf, part)
    else:
        for part in gl.static_range(4):
            copy_columns(present, (j - n_past) * 64, head * 256, bar, tiles, buf, part)


@gluon.jit
def _entries(table, tile, ok, BLOCK_TOKENS: gl.constexpr):
    return (
        load_entry(table, tile, ok, 0, BLOCK_TOKENS),
        load_entry(table, tile, ok, 1, BLOCK_TOKENS),
        load_entry(table, tile, ok, 2, BLOCK_TOKENS),
        load_entry(table, tile, ok, 3, BLOCK_TOKENS),
    )


@gluon.jit
def _produce(
    q, arena, tail, k_present, v_present, table, q_boxes, k_tiles, v_tiles, bars, k_row, v_row, head, first_token,
    first_tile, n_tiles, past, BLOCK_TOKENS: gl.constexpr,
):  # fmt: skip
    q_full, k_full, k_empty, v_full, v_empty = bars
    mbarrier.expect(q_full, 128 * 256 * 2)
    for i in gl.static_range(2):
        tma.async_copy_global_to_shared(q, [first_token + i * 32, head * 2, 0], q_full, q_boxes.index(i))
    entries = _entries(table, first_tile, (first_tile + 1) * 64 <= past, BLOCK_TOKENS)
    for i in range(n_tiles):
        j = first_tile + i
        # entries of the next tile are on their way while this one waits for a free buffer
        next_entries = _entries(table, j + 1, (j + 2) * 64 <= past, BLOCK_TOKENS)
        buf = i % 2
        phase = (i // 2 & 1) ^ 1
        mbarrier.wait(k_empty.index(buf), phase)
        _copy_tile(
            arena, tail, k_present, entries, k_row, 0, head, j, past, k_full.index(buf), k_tiles, buf, BLOCK_TOKENS
        )
        mbarrier.wait(v_empty.index(buf), phase)
        _copy_tile(
            arena, tail, v_present, entries, v_row, 16 * 64, head, j, past, v_full.index(buf), v_tiles, buf,
            BLOCK_TOKENS,
        )  # fmt: skip
        entries = next_entries


@gluon.jit
def _softmax(s, m, norm, row_key, first_row_key, j, past, window, scale_log2):
    """Mask, then one step of the running softmax. Keys of tile j start at j * 64; those of present tiles at `past`."""
    n_past = (past + 63) // 64
    start = gl.where(j < n_past, j * 64, past + (j - n_past) * 64)
    end = gl.where(j < n_past, gl.minimum(past, j * 64 + 64), start + 64)
    s = s * scale_log2
    # most tiles are seen whole by all 32 tokens of the rows
    if (start + 63 > first_row_key) | (start <= first_row_key + 31 - window) | (end < start + 64):
        key = start + gl.arange(0, 64, gl.SliceLayout(0, s.type.layout))
        hidden = (key[None, :] > row_key[:, None]) | (key[None, :] <= row_key[:, None] - window) | (key >= end)[None, :]
        s = gl.where(hidden, float("-inf"), s)
    m_new = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2(m - m_new)
    p = gl.exp2(s - m_new[:, None])
    return p.to(gl.bfloat16), m_new, norm * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _attend(out, q_box, k_tiles, v_tiles, bars, head, first_token, first_tile, n_tiles, past, window, scale_log2):
    """64 rows: 32 tokens from `first_token` on, 2 heads each; `q_box` holds them, and in the end the output."""
    q_full, k_full, k_empty, v_full, v_empty = bars
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    prob: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    score_row: gl.constexpr = gl.SliceLayout(1, score)
    output_row: gl.constexpr = gl.SliceLayout(1, output)

    q = q_box._reinterpret(gl.bfloat16, [1, 64, 256], gl.NVMMASharedLayout(128, 16, rank=2))
    first_key = past + first_token
    row_key = first_key + gl.arange(0, 64, score_row) // 2
    m = gl.full([64], -1e30, gl.float32, score_row)
    norm = gl.full([64], 0.0, gl.float32, score_row)
    zero = gl.full([64, 64], 0.0, gl.float32, score)
    o = gl.full([64, 256], 0.0, gl.float32, output)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q.index(0), k_tiles.index(0).permute((1, 0)), zero, use_acc=False)
    mbarrier.arrive(k_empty.index(0), count=1)
    p, m, norm, alpha = _softmax(s, m, norm, row_key, first_key, first_tile, past, window, scale_log2)
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
        p_next, m, norm, alpha = _softmax(s, m, norm, row_key, first_key, first_tile + i + 1, past, window, scale_log2)
        p_next = gl.convert_layout(p_next, prob)
        o, p = warpgroup_mma_wait(0, deps=[o_next, p])
        p = p_next
        mbarrier.arrive(v_empty.index(buf), count=1)
        o = o * gl.convert_layout(alpha, output_row)[:, None]
    last = n_tiles - 1
    mbarrier.wait(v_full.index(last % 2), last // 2 & 1)
    o = warpgroup_mma(p, v_tiles.index(last % 2), o)
    o = o / gl.convert_layout(norm, output_row)[:, None]
    q.index(0).store(o.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [first_token, head * 2, 0], q_box)
    tma.store_wait(0)


@gluon.jit
def prefill256_kernel(
    q, out, table, arena, tail, k_present, v_present, k_row, v_row, n_tokens, past, window, scale_log2,
    BLOCK_TOKENS: gl.constexpr,
):  # fmt: skip
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    # longest rows first; the heads of a row block side by side
    block = gl.num_programs(0) // 16 - 1 - gl.program_id(0) // 16
    head = gl.program_id(0) % 16
    first_token = block * 64
    n_past = (past + 63) // 64
    first_key = gl.maximum(past + first_token - window + 1, 0)
    first_tile = gl.where(first_key < past, first_key // 64, n_past + (first_key - past) // 64)
    n_tiles = n_past + (gl.minimum(first_token + 64, n_tokens) + 63) // 64 - first_tile

    q_boxes = gl.allocate_shared_memory(gl.bfloat16, [2, 32, 2, 256], gl.NVMMASharedLayout(128, 16, rank=3))
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], shared)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], shared)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=4)  # four quarters
        mbarrier.init(k_empty.index(i), count=2)  # both warp groups read every tile
        mbarrier.init(v_full.index(i), count=4)
        mbarrier.init(v_empty.index(i), count=2)
    bars = (q_full, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    out, q_boxes.index(0), k_tiles, v_tiles, bars, head, first_token, first_tile, n_tiles, past,
                    window, scale_log2,
                ),
            ),
            (
                _attend,
                (
                    out, q_boxes.index(1), k_tiles, v_tiles, bars, head, first_token + 32, first_tile, n_tiles,
                    past, window, scale_log2,
                ),
            ),
            (
                _produce,
                (
                    q, arena, tail, k_present, v_present, table, q_boxes, k_tiles, v_tiles, bars, k_row, v_row,
                    head, first_token, first_tile, n_tiles, past, BLOCK_TOKENS,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def prefill256(
    q: torch.Tensor, out: torch.Tensor, arena: torch.Tensor, view: LayerView, table: torch.Tensor, past: int,
    k: torch.Tensor, v: torch.Tensor, tail: torch.Tensor, window_tokens: int, scale_log2: float,
) -> None:  # fmt: skip
    """q and out are [tokens, 32, 256]; k and v are [tokens, 16 * 256]; `tail` is [2 * 16 * 64, 256].

    `past` counts the held tokens, from the first slot of the first page in `table`; `window_tokens` includes the asking
    token.
    """
    n_tokens = q.shape[0]
    shared = gl.NVMMASharedLayout(128, 16, rank=2)
    arena_rows = TensorDescriptor.from_tensor(arena.view(torch.bfloat16).view(-1, 256), [view.block_tokens, 64], shared)
    k_row, v_row = (offset // 512 for offset in view.data_offsets)
    prefill256_kernel[(triton.cdiv(n_tokens, 64) * 16,)](
        *(TensorDescriptor.from_tensor(x, [32, 2, 256], gl.NVMMASharedLayout(128, 16, rank=3)) for x in (q, out)),
        table,
        arena_rows,
        *(TensorDescriptor.from_tensor(x, [64, 64], shared) for x in (tail, k, v)),
        k_row, v_row, n_tokens, past, window_tokens, scale_log2, BLOCK_TOKENS=view.block_tokens, num_warps=4,
        maxnreg=168,
    )  # fmt: skip
