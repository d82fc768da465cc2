"""Made once per chunk and layer for the prefill kernels: rotated keys of a latent, and the ragged end of the past."""

import torch
import triton
import triton.language as tl

from bench.spike.pages import LayerView

TILE_TOKENS = 64


@triton.jit
def rotate_kernel(
    DATA, TABLE, PRESENT, COS, SIN, W, ROTATED, past, n_tokens, offset, present_stride, D: tl.constexpr,
    P: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Rotary dims of K for one tile and head: past tiles from pages, then present tiles from the activations.

    ROTATED is [head, tile * 64 + token, 128]; rows past the last token of either part are zero.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    n_past = tl.cdiv(past, 64)
    n = tl.arange(0, 64)
    d = tl.arange(0, 64)[None, :]
    in_past = tile < n_past
    t = tl.where(in_past, tile * 64 + n, (tile - n_past) * 64 + n)
    ok = t < tl.where(in_past, past, n_tokens)
    page = tl.load(TABLE + t // P, mask=ok & in_past, other=0).to(tl.int64)
    from_page = DATA + offset + (page * UNIT + (head * P + t % P) * D)[:, None] + d
    from_present = PRESENT + (t.to(tl.int64) * present_stride + head * D)[:, None] + d
    page_ok = (ok & in_past)[:, None]
    present_ok = (ok & (tile >= n_past))[:, None]
    # one of the two is masked off, so their sum is the row
    x1 = tl.load(from_page, mask=page_ok, other=0.0).to(tl.float32) + tl.load(
        from_present, mask=present_ok, other=0.0
    ).to(tl.float32)
    x2 = tl.load(from_page + 64, mask=page_ok, other=0.0).to(tl.float32) + tl.load(
        from_present + 64, mask=present_ok, other=0.0
    ).to(tl.float32)
    position = tl.where(in_past, t, past + t)[:, None] * 64 + d
    cos = tl.load(COS + position, mask=ok[:, None], other=0.0)
    sin = tl.load(SIN + position, mask=ok[:, None], other=0.0)
    y1 = x1 * tl.load(W + d)
    y2 = x2 * tl.load(W + 64 + d)
    row = (head * tl.num_programs(0) + tile) * 64 + n
    out = ROTATED + row[:, None] * 128 + d
    tl.store(out, (y1 * cos - y2 * sin).to(ROTATED.dtype.element_ty))
    tl.store(out + 64, (y2 * cos + y1 * sin).to(ROTATED.dtype.element_ty))


@triton.jit
def tail_kernel(DATA, TABLE, TAIL, past, k_offset, v_offset, D: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr):
    """Copy the last past % 64 tokens of one head and vector out of their pages, zero-padded to 64 rows.

    TMA copies whole pages, and rows past the last token may hold anything: 0 x NaN would be NaN in P.V.
    """
    head = tl.program_id(0)
    vector = tl.program_id(1)
    n = tl.arange(0, 64)
    t = past // 64 * 64 + n
    ok = t < past
    d = tl.arange(0, D)[None, :]
    page = tl.load(TABLE + t // P, mask=ok, other=0).to(tl.int64)
    offset = tl.where(vector == 0, k_offset, v_offset)
    x = tl.load(DATA + offset + (page * UNIT + (head * P + t % P) * D)[:, None] + d, mask=ok[:, None], other=0.0)
    tl.store(TAIL + ((vector * tl.num_programs(0) + head) * 64 + n[:, None]) * D + d, x)


def rotated_rows(past: int, n_tokens: int) -> int:
    return (-(-past // TILE_TOKENS) + -(-n_tokens // TILE_TOKENS)) * TILE_TOKENS


def rotate(
    arena: torch.Tensor, view: LayerView, table: torch.Tensor, present: torch.Tensor, past: int,
    angles: tuple[torch.Tensor, torch.Tensor], w: torch.Tensor, out: torch.Tensor,
) -> None:  # fmt: skip
    """Fill `out` [kv heads, rotated_rows, 128]; `present` is [tokens, kv heads * dim], `table` one sequence's row."""
    data = arena.view(present.dtype)
    item = present.dtype.itemsize
    rotate_kernel[(out.shape[1] // TILE_TOKENS, view.kv_heads)](
        data, table, present, *angles, w, out, past, present.shape[0],
        view.data_offsets[0] // item,
        present.stride(0),
        D=view.dim,
        P=view.block_tokens,
        UNIT=256 // item,
        num_warps=8,
    )  # fmt: skip


def copy_tail(arena: torch.Tensor, view: LayerView, table: torch.Tensor, past: int, out: torch.Tensor) -> None:
    """Fill `out` [vectors, kv heads, 64, dim]. Nothing to do where the past is whole tiles."""
    if past % TILE_TOKENS == 0:
        return
    item = out.dtype.itemsize
    k_offset, v_offset = (offset // item for offset in (view.data_offsets * 2)[:2])
    tail_kernel[(view.kv_heads, len(view.data_offsets))](
        arena.view(out.dtype), table, out, past, k_offset, v_offset, D=view.dim, P=view.block_tokens,
        UNIT=256 // item,
        num_warps=8,
    )  # fmt: skip
