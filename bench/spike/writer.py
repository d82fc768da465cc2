"""The tail writer: rows of this step's activations into pages, by a list of (row, page offset, slot in the page)."""

import torch
import triton
import triton.language as tl

from bench.spike.pages import LayerView


@triton.jit
def write_kernel(
    K, V, DATA, SCALES, ROWS, PAGES, SLOTS, k_stride, v_stride, k_offset, v_offset, k_scale_offset, v_scale_offset,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, UNIT: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """One activation row: all its heads, K (or the latent) or V. A row that appears twice is kept twice."""
    i = tl.program_id(0)
    vector = tl.program_id(1)
    row = tl.load(ROWS + i).to(tl.int64)
    page = tl.load(PAGES + i).to(tl.int64)
    at = tl.arange(0, H)[:, None] * P + tl.load(SLOTS + i)
    d = tl.arange(0, D)[None, :]
    h = tl.arange(0, H)[:, None]
    x = tl.load(K + row * k_stride + h * D + d) if vector == 0 else tl.load(V + row * v_stride + h * D + d)
    offset = tl.where(vector == 0, k_offset, v_offset)
    if QUANT:
        scale_offset = tl.where(vector == 0, k_scale_offset, v_scale_offset)
        x = x.to(tl.float32)
        scale = tl.max(tl.abs(x), 1)[:, None] / 127.0
        code = x / tl.where(scale > 0.0, scale, 1.0)
        # round half away from zero: casting truncates
        x = tl.where(code >= 0.0, code + 0.5, code - 0.5).to(tl.int8)
        tl.store(SCALES + scale_offset + page * 64 + at, scale)
    tl.store(DATA + offset + page * UNIT + at * D + d, x)


def write(
    arena: torch.Tensor, view: LayerView, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor,
    pages: torch.Tensor, slots: torch.Tensor,
) -> None:  # fmt: skip
    """Write `k[rows]` and `v[rows]` ([tokens, kv heads * dim] each; v is ignored for a latent) to their pages."""
    quant = bool(view.scale_offsets)
    data = arena.view(torch.int8 if quant else k.dtype)
    item = data.dtype.itemsize
    k_offset, v_offset = (offset // item for offset in (view.data_offsets * 2)[:2])
    k_scale, v_scale = (offset // 4 for offset in ((view.scale_offsets or (0,)) * 2)[:2])
    write_kernel[(len(rows), len(view.data_offsets))](
        k, v, data, arena.view(torch.float32), rows, pages, slots, k.stride(0), v.stride(0), k_offset, v_offset,
        k_scale, v_scale, H=view.kv_heads, D=view.dim, P=view.block_tokens,
        UNIT=256 // item,
        QUANT=quant,
        num_warps=4,
    )  # fmt: skip


def targets(view: LayerView, table: torch.Tensor, tokens: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Page offset and slot for each token of one sequence."""
    t = torch.arange(tokens.start, tokens.stop, device=table.device)
    return table[t // view.block_tokens], (t % view.block_tokens).to(torch.int32)
