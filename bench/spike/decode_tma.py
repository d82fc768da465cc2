"""Latent decode over pages on Hopper (Gluon): a persistent program per multiprocessor, tiles by TMA, scores transposed.

Four warps look pages up and keep three tiles of 64 tokens x 512 dims on their way, across sequences and heads, so that
the memory system never idles. Two warp groups take every second tile and compute S' = K q' and O' = n' P': tokens and
dims are the 64-row side of a tensor-core tile and the 8 query heads its 8 columns, so no row is padding, and every
operand but the 128 rotary dims is read from shared memory where TMA put it.

The rotation is split: q.R(t)y = (R(-t0)q).(R(t - t0)y) with t0 a tile's first token. R(t - t0) is the same for all
tiles and stays in registers; q turns by the same step from tile to tile. No angle is read inside the loop.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bench.spike.decode import INT8_TO_BF16, Partial
from bench.spike.pages import LayerView
from bench.spike.work import Work
from windowpane.attention.hopper.tiles import copy_from_page


@gluon.jit
def _produce(
    which: gl.constexpr, arena, table_ptr, items, program_items, tiles, full, empty, table_stride, slice_row,
    BLOCK_TOKENS: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = 64 // BLOCK_TOKENS
    PAGE: gl.constexpr = which * PAGES // 4
    BUFS: gl.constexpr = tiles.type.shape[0]
    UNITS_PER_ROW: gl.constexpr = 512 * tiles.dtype.primitive_bitwidth // 8 // 256
    program = gl.program_id(0)
    count = 0
    for item in range(gl.load(program_items + program), gl.load(program_items + program + 1)):
        table = table_ptr + gl.load(items + item * 4) * table_stride
        row = slice_row + gl.load(items + item * 4 + 1) * BLOCK_TOKENS
        first = gl.load(items + item * 4 + 2)
        last = first + gl.load(items + item * 4 + 3) - 1
        entry = gl.load(table + first * PAGES + PAGE)
        for j in range(first, last + 1):
            # the entry of the next tile is on its way while this one waits for a free buffer
            next_entry = gl.load(table + (j + 1) * PAGES + PAGE, mask=j < last, other=0)
            buf = count % BUFS
            mbarrier.wait(empty.index(buf), (count // BUFS & 1) ^ 1)
            copy_from_page(
                arena, entry, UNITS_PER_ROW, row, full.index(count % (2 * BUFS)), tiles, buf, which, BLOCK_TOKENS
            )
            entry = next_entry
            count += 1


@gluon.jit
def _rotated(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@gluon.jit
def _dequantise(codes, out, buf):
    """One tile of int8 codes to bf16, 128 dims at a time: they are exact, scales come later."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    code_parts = codes._reinterpret(gl.int8, [codes.type.shape[0] * 4, 64, 128], gl.NVMMASharedLayout(128, 8, rank=2))
    out_parts = out._reinterpret(gl.bfloat16, [out.type.shape[0] * 4, 64, 128], gl.NVMMASharedLayout(128, 16, rank=2))
    for c in gl.static_range(4):
        x = code_parts.index(buf * 4 + c).load(layout)
        out_parts.index(buf * 4 + c).store(
            gl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=4)
        )


@gluon.jit
def _attend(
    which, q, q_rotary, probs, floats, q_ptr, scales_ptr, table_ptr, items, program_items, past_ptr, cos_ptr,
    sin_ptr, w_ptr, part_ptr, lse_ptr, tiles, full, empty, table_stride, scale_offset, scale_log2,
    BLOCK_TOKENS: gl.constexpr, QUANT: gl.constexpr,
):  # fmt: skip
    """Every second tile of every item: those whose number in the program's stream is `which` modulo 2.

    QUANT: a tile of codes first becomes a bf16 tile in `floats` (otherwise the same as `tiles`); scores and
    probabilities are multiplied by the tokens' scales.
    """
    BUFS: gl.constexpr = tiles.type.shape[0]
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    acc: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])  # scores [64, 8] and output [512, 8]
    key: gl.constexpr = gl.DotOperandLayout(0, acc, 2)
    head_of: gl.constexpr = gl.SliceLayout(0, acc)
    token_of: gl.constexpr = gl.SliceLayout(1, acc)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])  # [8, 512] and [64, 128]
    narrow: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])  # [8, 64]
    q128 = q._reinterpret(gl.bfloat16, [4, 8, 128], shared)
    q256 = q._reinterpret(gl.bfloat16, [2, 8, 256], shared)
    tiles64 = floats._reinterpret(gl.bfloat16, [BUFS * 8, 64, 64], shared)
    tiles128 = floats._reinterpret(gl.bfloat16, [BUFS * 4, 64, 128], shared)
    tiles256 = floats._reinterpret(gl.bfloat16, [BUFS * 2, 64, 256], shared)

    # R(t - t0) for the 64 tokens of any tile, and w, as the rows and columns of a key operand
    in_tile = gl.arange(0, 64, gl.SliceLayout(1, key))
    pair = gl.arange(0, 64, gl.SliceLayout(0, key))
    cos = gl.load(cos_ptr + in_tile[:, None] * 64 + pair[None, :])
    sin = gl.load(sin_ptr + in_tile[:, None] * 64 + pair[None, :])
    w1 = gl.load(w_ptr + pair)[None, :]
    w2 = gl.load(w_ptr + 64 + pair)[None, :]
    # R(-128), the step from one of our tiles to the next, for q
    q_head = gl.arange(0, 8, gl.SliceLayout(1, narrow))[:, None]
    q_pair = gl.arange(0, 64, gl.SliceLayout(0, narrow))[None, :]
    step_cos = gl.load(cos_ptr + 128 * 64 + q_pair)
    step_sin = -gl.load(sin_ptr + 128 * 64 + q_pair)

    token = gl.arange(0, 64, token_of)
    zero = gl.full([64, 8], 0.0, gl.float32, acc)
    program = gl.program_id(0)
    done = 0
    for item in range(gl.load(program_items + program), gl.load(program_items + program + 1)):
        seq = gl.load(items + item * 4)
        head = gl.load(items + item * 4 + 1)
        first = gl.load(items + item * 4 + 2)
        n_tiles = gl.load(items + item * 4 + 3)
        past = gl.load(past_ptr + seq)
        skip = (done + which) % 2
        q_base = q_ptr + (seq * 32 + head * 8) * 512
        wide_head = gl.arange(0, 8, gl.SliceLayout(1, wide))[:, None]
        q.store(gl.load(q_base + wide_head * 512 + gl.arange(0, 512, gl.SliceLayout(0, wide))[None, :]))
        q1 = gl.load(q_base + q_head * 512 + q_pair).to(gl.float32)
        q2 = gl.load(q_base + q_head * 512 + 64 + q_pair).to(gl.float32)
        t0_cos = gl.load(cos_ptr + (first + skip) * 64 * 64 + q_pair)
        t0_sin = -gl.load(sin_ptr + (first + skip) * 64 * 64 + q_pair)
        q1, q2 = _rotated(q1, q2, t0_cos, t0_sin)
        if QUANT:
            # table entries are read two of our tiles ahead and scales one: neither load is waited for
            table = table_ptr + seq * table_stride + (first + skip) * (64 // BLOCK_TOKENS) + token // BLOCK_TOKENS
            scale_row = scale_offset + head * BLOCK_TOKENS + token % BLOCK_TOKENS
            here = past - (first + skip) * 64
            entry = gl.load(table, mask=token < here, other=0)
            scale = gl.load(scales_ptr + entry.to(gl.int64) * 64 + scale_row, mask=token < here, other=0.0)
            entry = gl.load(table + 2 * (64 // BLOCK_TOKENS), mask=token + 128 < here, other=0)

        m = gl.full([8], -1e30, gl.float32, head_of)
        norm = gl.full([8], 0.0, gl.float32, head_of)
        o = gl.full([512, 8], 0.0, gl.float32, acc)
        for i in range(skip, n_tiles, 2):
            buf = (done + i) % BUFS
            visible = past - (first + i) * 64
            q_rotary.index(0).store(q1.to(gl.bfloat16))
            q_rotary.index(1).store(q2.to(gl.bfloat16))
            q1, q2 = _rotated(q1, q2, step_cos, step_sin)
            if QUANT:
                table += 2 * (64 // BLOCK_TOKENS)
                next_scale = gl.load(
                    scales_ptr + entry.to(gl.int64) * 64 + scale_row, mask=token + 128 < visible, other=0.0
                )
                entry = gl.load(table + 2 * (64 // BLOCK_TOKENS), mask=token + 256 < visible, other=0)
            mbarrier.wait(full.index((done + i) % (2 * BUFS)), (done + i) // (2 * BUFS) & 1)
            if QUANT:
                _dequantise(tiles, floats, buf)
                mbarrier.arrive(empty.index(buf), count=1)
            else:
                if visible < 64:
                    # rows past the last token may hold anything, and 0 x NaN is NaN: clear them
                    row = gl.arange(0, 64, gl.SliceLayout(1, wide))[:, None]
                    for c in gl.static_range(4):
                        piece = tiles128.index(buf * 4 + c)
                        piece.store(
                            gl.where(row < visible, piece.load(wide), gl.full([64, 128], 0.0, gl.bfloat16, wide))
                        )
            fence_async_shared()
            # i >> 30 is 0, but only we know: fixed addresses would tie up registers for their matrix descriptors
            f = i >> 30
            s = warpgroup_mma(
                tiles128.index(buf * 4 + 1), q128.index(f * 4 + 1).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            s = warpgroup_mma(tiles256.index(buf * 2 + 1), q256.index(f * 2 + 1).permute((1, 0)), s, is_async=True)
            x1 = tiles64.index(buf * 8).load(key).to(gl.float32) * w1
            x2 = tiles64.index(buf * 8 + 1).load(key).to(gl.float32) * w2
            k1, k2 = _rotated(x1, x2, cos, sin)
            s = warpgroup_mma(k1.to(gl.bfloat16), q_rotary.index(f * 2).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(k2.to(gl.bfloat16), q_rotary.index(f * 2 + 1).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])

            if QUANT:
                s = s * scale[:, None]
            s = gl.where((token < visible)[:, None], s * scale_log2, float("-inf"))
            m_new = gl.maximum(m, gl.max(s, 0))
            alpha = gl.exp2(m - m_new)
            p = gl.exp2(s - m_new[None, :])
            norm = norm * alpha + gl.sum(p, 0)
            m = m_new
            if QUANT:
                p = p * scale[:, None]
                scale = next_scale
            probs.permute((1, 0)).store(p.to(gl.bfloat16))
            fence_async_shared()
            o = o * alpha[None, :]
            o = warpgroup_mma(floats.index(buf).permute((1, 0)), probs.permute((1, 0)), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            if not QUANT:
                mbarrier.arrive(empty.index(buf), count=1)
        done += n_tiles
        # an item of one tile leaves nothing for one of us: a norm of 0, which `combine` gives no weight
        part_row = (item * 2 + which) * 8 + gl.arange(0, 8, head_of)
        dim = gl.arange(0, 512, token_of)
        gl.store(part_ptr + part_row[None, :] * 512 + dim[:, None], o / gl.maximum(norm, 1e-30)[None, :])
        gl.store(lse_ptr + part_row, m + gl.log2(norm))


@gluon.jit
def decode_tma_kernel(
    q_ptr, arena, scales_ptr, table_ptr, items, program_items, past_ptr, cos_ptr, sin_ptr, w_ptr, part_ptr,
    lse_ptr, table_stride, slice_row, scale_offset, scale_log2, BLOCK_TOKENS: gl.constexpr, BUFS: gl.constexpr,
    QUANT: gl.constexpr,
):  # fmt: skip
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    tiles = gl.allocate_shared_memory(arena.dtype, [BUFS, 64, 512], arena.layout)
    if QUANT:
        # two buffers, so that each belongs to one warp group, and so does the bf16 tile made of it
        gl.static_assert(BUFS == 2)
        floats = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], shared)
    else:
        floats = tiles
    q = gl.allocate_shared_memory(gl.bfloat16, [2, 8, 512], shared)
    rotary0 = gl.allocate_shared_memory(gl.bfloat16, [2, 8, 64], shared)
    rotary1 = gl.allocate_shared_memory(gl.bfloat16, [2, 8, 64], shared)
    probs = gl.allocate_shared_memory(gl.bfloat16, [2, 8, 64], shared)
    # a barrier per buffer and warp group: a group that saw only every second phase could take an old one for a new one
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BUFS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFS):
        mbarrier.init(full.index(i), count=4)  # four producers
        mbarrier.init(full.index(BUFS + i), count=4)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    0, q.index(0), rotary0, probs.index(0), floats, q_ptr, scales_ptr, table_ptr, items,
                    program_items, past_ptr, cos_ptr, sin_ptr, w_ptr, part_ptr, lse_ptr, tiles, full, empty,
                    table_stride, scale_offset, scale_log2, BLOCK_TOKENS, QUANT,
                ),
            ),
            (
                _attend,
                (
                    1, q.index(1), rotary1, probs.index(1), floats, q_ptr, scales_ptr, table_ptr, items,
                    program_items, past_ptr, cos_ptr, sin_ptr, w_ptr, part_ptr, lse_ptr, tiles, full, empty,
                    table_stride, scale_offset, scale_log2, BLOCK_TOKENS, QUANT,
                ),
            ),
            (
                _produce,
                (0, arena, table_ptr, items, program_items, tiles, full, empty, table_stride, slice_row, BLOCK_TOKENS),
            ),
            (
                _produce,
                (1, arena, table_ptr, items, program_items, tiles, full, empty, table_stride, slice_row, BLOCK_TOKENS),
            ),
            (
                _produce,
                (2, arena, table_ptr, items, program_items, tiles, full, empty, table_stride, slice_row, BLOCK_TOKENS),
            ),
            (
                _produce,
                (3, arena, table_ptr, items, program_items, tiles, full, empty, table_stride, slice_row, BLOCK_TOKENS),
            ),
        ],
        [4, 1, 1, 1, 1],
        [232, 40, 40, 40, 40],
    )  # fmt: skip


def decode_tma(
    q: torch.Tensor, arena: torch.Tensor, view: LayerView, table: torch.Tensor, past: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor], w: torch.Tensor, work: Work, out: Partial, scale_log2: float,
) -> None:  # fmt: skip
    """Attend the past of every sequence; `decode.combine` finishes. q is [sequence, 32, 512], as for `decode.decode`.

    Each item leaves two partial results, one per warp group: `out` has room for them.
    """
    quant = bool(view.scale_offsets)
    data = arena.view(torch.int8 if quant else torch.bfloat16)
    row_bytes = 512 * data.dtype.itemsize
    # int8 slices need not start at a whole row of the arena, but pages do: count rows from the slice on
    offset = view.data_offsets[0] // data.dtype.itemsize
    rows = (data.numel() - offset) // 512
    column = 128 // data.dtype.itemsize
    arena_rows = TensorDescriptor.from_tensor(
        data[offset : offset + rows * 512].view(rows, 512),
        [view.block_tokens, column],
        gl.NVMMASharedLayout(128, 8 * data.dtype.itemsize, rank=2),
    )
    assert view.page_bytes % row_bytes == 0, "TMA reads whole rows: pages must start at a multiple of a row"
    decode_tma_kernel[(work.programs,)](
        q, arena_rows, arena.view(torch.float32), table, work.items, work.program_items, past, *angles, w,
        out.part, out.lse, table.stride(0), 0,
        view.scale_offsets[0] // 4 if quant else 0,
        scale_log2,
        BLOCK_TOKENS=view.block_tokens,
        BUFS=2 if quant else 3,
        QUANT=quant,
        num_warps=4,
        maxnreg=168,
    )  # fmt: skip
