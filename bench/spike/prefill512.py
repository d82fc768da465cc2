"""Prefill attention for 512-dim heads on Hopper (Gluon): past from pages, present from activations.

One program owns 64 rows: the 8 query heads of one KV head times 8 tokens. Its output, 64 x 512 in float32, fills two
warp groups (256 dims each, 128 registers a thread), so one tile of 64 tokens x 512 dims serves as K for both and as V
for the half each owns. Four more warps bring tiles in by TMA and look pages up ahead of time.

Latent: the tile is n. K differs from it only in the 128 rotary dims, which come rotated from a scratch buffer
(`rebuild.py`); w of the other 384 dims is folded into q. Pair: K and V are two tiles, each with one buffer instead of
two.
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
from bench.spike.tiles import copy_tile, load_entry


@gluon.jit
def _produce(
    which: gl.constexpr, q, arena, tail, k_present, v_present, rotated, table, q_box, tiles, rotated_tile, bars,
    k_row, v_row, head, first_token, n_tiles, past, rotated_rows, BLOCK_TOKENS: gl.constexpr, LATENT: gl.constexpr,
):  # fmt: skip
    q_full, full, empty, rotated_full, rotated_empty = bars
    if which == 0:
        mbarrier.expect(q_full, 64 * 512 * 2)
        tma.async_copy_global_to_shared(q, [first_token, head * 8, 0], q_full, q_box)
    entry = load_entry(table, 0, past >= 64, which, BLOCK_TOKENS)
    for j in range(n_tiles):
        # the entry of the next tile is on its way while this one waits for a free buffer
        next_entry = load_entry(table, j + 1, (j + 2) * 64 <= past, which, BLOCK_TOKENS)
        # a table entry counts 256 bytes, a row of the arena descriptor is one vector of 4 x 256 bytes
        if LATENT:
            buf = j % 2
            mbarrier.wait(empty.index(buf), (j // 2 & 1) ^ 1)
            copy_tile(
                arena, tail, k_present, entry, 4, k_row, 0, head, j, past, full.index(buf), tiles, buf, which,
                BLOCK_TOKENS,
            )  # fmt: skip
            if which == 0:
                mbarrier.wait(rotated_empty, (j & 1) ^ 1)
                mbarrier.expect(rotated_full, 64 * 128 * 2)
                tma.async_copy_global_to_shared(rotated, [head * rotated_rows + j * 64, 0], rotated_full, rotated_tile)
        else:
            mbarrier.wait(empty.index(0), (j & 1) ^ 1)
            copy_tile(
                arena, tail, k_present, entry, 4, k_row, 0, head, j, past, full.index(0), tiles, 0, which, BLOCK_TOKENS
            )
            mbarrier.wait(empty.index(1), (j & 1) ^ 1)
            copy_tile(
                arena, tail, v_present, entry, 4, v_row, 4 * 64, head, j, past, full.index(1), tiles, 1, which,
                BLOCK_TOKENS,
            )  # fmt: skip
        entry = next_entry


@gluon.jit
def _scores(q, rotated_tile, tiles, bars, j, LATENT: gl.constexpr):
    """Wait for tile j and start S = q.K. Latent: rotary dims from the rotated tile, the others from the latent."""
    _q_full, full, _empty, rotated_full, _rotated_empty = bars
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    s = gl.full([64, 64], 0.0, gl.float32, score)
    if LATENT:
        buf = j % 2
        q128 = q._reinterpret(gl.bfloat16, [4, 64, 128], shared)
        q256 = q._reinterpret(gl.bfloat16, [2, 64, 256], shared)
        # j >> 30 is 0, but only we know: an address that changes from tile to tile is computed when needed, while the
        # compiler would keep the 32 matrix descriptors of a fixed one in 64 registers
        zero = j >> 30
        tiles128 = tiles._reinterpret(gl.bfloat16, [8, 64, 128], shared)
        tiles256 = tiles._reinterpret(gl.bfloat16, [4, 64, 256], shared)
        mbarrier.wait(full.index(buf), j // 2 & 1)
        mbarrier.wait(rotated_full, j & 1)
        s = warpgroup_mma(
            q128.index(zero * 4 + 1), tiles128.index(buf * 4 + 1).permute((1, 0)), s, use_acc=False, is_async=True
        )
        s = warpgroup_mma(q256.index(zero * 2 + 1), tiles256.index(buf * 2 + 1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q128.index(zero * 4), rotated_tile.permute((1, 0)), s, is_async=True)
    else:
        mbarrier.wait(full.index(0), j & 1)
        s = warpgroup_mma(q, tiles.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
    return s


@gluon.jit
def _softmax(s, m, norm, row_token, j, past, scale_log2):
    column = gl.arange(0, 64, gl.SliceLayout(0, s.type.layout))
    n_past = (past + 63) // 64
    visible = gl.where(j < n_past, past - j * 64, row_token - (j - n_past) * 64 + 1)
    s = gl.where(column[None, :] < visible[:, None], s * scale_log2, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2(m - m_new)
    p = gl.exp2(s - m_new[:, None])
    return p.to(gl.bfloat16), m_new, norm * alpha[:, None] + p, alpha


@gluon.jit
def _attend(
    out, q_box, probs, tiles, rotated_tile, bars, head, first_token, n_tiles, past, scale_log2, LATENT: gl.constexpr
):
    """64 rows: 8 tokens from `first_token` on, 8 heads each; `q_box` holds them, and in the end the output."""
    q_full, full, empty, _rotated_full, rotated_empty = bars
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    score_row: gl.constexpr = gl.SliceLayout(1, score)
    output_row: gl.constexpr = gl.SliceLayout(1, output)
    S_MMAS: gl.constexpr = 3 if LATENT else 1  # wgmma groups that `_scores` starts

    q = q_box._reinterpret(gl.bfloat16, [64, 512], shared)
    row_token = first_token + gl.arange(0, 64, score_row) // 8
    m = gl.full([64], -1e30, gl.float32, score_row)
    # summed over columns once, at the end: a sum per tile would have to cross warp groups each time
    norm = gl.full([64, 64], 0.0, gl.float32, score)
    o = gl.full([64, 512], 0.0, gl.float32, output)
    mbarrier.wait(q_full, 0)
    s = warpgroup_mma_wait(0, deps=[_scores(q, rotated_tile, tiles, bars, 0, LATENT)])
    if LATENT:
        mbarrier.arrive(rotated_empty, count=1)
    else:
        mbarrier.arrive(empty.index(0), count=1)
    for j in range(n_tiles - 1):
        buf = j % 2 if LATENT else 1
        p, m, norm, alpha = _softmax(s, m, norm, row_token, j, past, scale_log2)
        probs.store(p)
        fence_async_shared()
        o = o * gl.convert_layout(alpha, output_row)[:, None]
        if not LATENT:
            mbarrier.wait(full.index(1), j & 1)
        # P.V of this tile and the scores of the next one go to the tensor cores back to back
        o = warpgroup_mma(probs, tiles.index(buf), o, is_async=True)
        s = _scores(q, rotated_tile, tiles, bars, j + 1, LATENT)
        o = warpgroup_mma_wait(S_MMAS, deps=[o])
        mbarrier.arrive(empty.index(buf), count=1)
        s = warpgroup_mma_wait(0, deps=[s])
        if LATENT:
            mbarrier.arrive(rotated_empty, count=1)
        else:
            mbarrier.arrive(empty.index(0), count=1)
    last = n_tiles - 1
    p, m, norm, alpha = _softmax(s, m, norm, row_token, last, past, scale_log2)
    probs.store(p)
    fence_async_shared()
    o = o * gl.convert_layout(alpha, output_row)[:, None]
    if not LATENT:
        mbarrier.wait(full.index(1), last & 1)
    o = warpgroup_mma(probs, tiles.index(last % 2 if LATENT else 1), o)
    o = o / gl.convert_layout(gl.sum(norm, 1), output_row)[:, None]
    q.store(o.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [first_token, head * 8, 0], q_box)
    tma.store_wait(0)


@gluon.jit
def prefill512_kernel(
    q, out, table, arena, tail, k_present, v_present, rotated, k_row, v_row, n_tokens, past, rotated_rows,
    scale_log2, BLOCK_TOKENS: gl.constexpr, LATENT: gl.constexpr,
):  # fmt: skip
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    # longest rows first; the four heads of a row block side by side
    block = gl.num_programs(0) // 4 - 1 - gl.program_id(0) // 4
    head = gl.program_id(0) % 4
    first_token = block * 8
    n_tiles = (past + 63) // 64 + (gl.minimum(first_token + 8, n_tokens) + 63) // 64

    q_box = gl.allocate_shared_memory(gl.bfloat16, [8, 8, 512], gl.NVMMASharedLayout(128, 16, rank=3))
    probs = gl.allocate_shared_memory(gl.bfloat16, [64, 64], shared)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], shared)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    rotated_tile = gl.allocate_shared_memory(gl.bfloat16, [64, 128], shared)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    rotated_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    rotated_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=4)  # four producers
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(rotated_full, count=1)
    mbarrier.init(rotated_empty, count=1)
    bars = (q_full, full, empty, rotated_full, rotated_empty)
    gl.warp_specialize(
        [
            (
                _attend,
                (out, q_box, probs, tiles, rotated_tile, bars, head, first_token, n_tiles, past, scale_log2, LATENT),
            ),
            (
                _produce,
                (
                    0, q, arena, tail, k_present, v_present, rotated, table, q_box, tiles, rotated_tile, bars,
                    k_row, v_row, head, first_token, n_tiles, past, rotated_rows, BLOCK_TOKENS, LATENT,
                ),
            ),
            (
                _produce,
                (
                    1, q, arena, tail, k_present, v_present, rotated, table, q_box, tiles, rotated_tile, bars,
                    k_row, v_row, head, first_token, n_tiles, past, rotated_rows, BLOCK_TOKENS, LATENT,
                ),
            ),
            (
                _produce,
                (
                    2, q, arena, tail, k_present, v_present, rotated, table, q_box, tiles, rotated_tile, bars,
                    k_row, v_row, head, first_token, n_tiles, past, rotated_rows, BLOCK_TOKENS, LATENT,
                ),
            ),
            (
                _produce,
                (
                    3, q, arena, tail, k_present, v_present, rotated, table, q_box, tiles, rotated_tile, bars,
                    k_row, v_row, head, first_token, n_tiles, past, rotated_rows, BLOCK_TOKENS, LATENT,
                ),
            ),
        ],
        [1, 1, 1, 1],
        [24, 24, 24, 24],
    )  # fmt: skip


def prefill512(
    q: torch.Tensor, out: torch.Tensor, arena: torch.Tensor, view: LayerView, table: torch.Tensor, past: int,
    present: tuple[torch.Tensor, ...], tail: torch.Tensor, rotated: torch.Tensor, scale_log2: float,
) -> None:  # fmt: skip
    """q and out are [tokens, 32, 512]; `present` holds [tokens, 4 * 512] latents, or K and V; `table` is one row.

    `tail` is [vectors * 4 * 64, 512]; `rotated` is [4, rotated_rows, 128] and ignored for a pair.
    """
    n_tokens = q.shape[0]
    shared = gl.NVMMASharedLayout(128, 16, rank=2)
    arena_rows = TensorDescriptor.from_tensor(arena.view(torch.bfloat16).view(-1, 512), [view.block_tokens, 64], shared)
    k, v = (TensorDescriptor.from_tensor(x, [64, 128], shared) for x in (present * 2)[:2])
    k_row, v_row = (offset // 1024 for offset in (view.data_offsets * 2)[:2])
    prefill512_kernel[(triton.cdiv(n_tokens, 8) * 4,)](
        *(TensorDescriptor.from_tensor(x, [8, 8, 512], gl.NVMMASharedLayout(128, 16, rank=3)) for x in (q, out)),
        table,
        arena_rows,
        TensorDescriptor.from_tensor(tail, [64, 128], shared),
        k,
        v,
        TensorDescriptor.from_tensor(rotated.view(-1, 128), [64, 128], shared),
        k_row, v_row, n_tokens, past, rotated.shape[1], scale_log2, BLOCK_TOKENS=view.block_tokens,
        LATENT=view.latent, num_warps=8, maxnreg=168,
    )  # fmt: skip
