"""Is the tail writer exact? On a small arena, on any device: used on the GPU and in Triton's interpreter."""

import torch

from bench.spike.pages import LayerView, random_tables, rows, scales
from bench.spike.writer import targets, write


def check(view: LayerView, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """One chunk leaves two tails, one of them in the middle of it; everything else in the arena stays as it was."""
    arena = torch.randint(0, 256, (12 * view.page_bytes,), dtype=torch.uint8, device=device)
    before = arena.clone()
    table = random_tables(view, [3 * view.block_tokens, 2 * view.block_tokens], arena.numel(), device)
    k, v = (torch.randn(100, view.kv_heads * view.dim, device=device).to(dtype) for _ in range(2))
    tails = [(0, range(5, 5 + 33), 20), (1, range(2, 2 + 21), 79)]  # (table row, positions, first activation row)
    parts = [
        (*targets(view, table[seq], where), torch.arange(at, at + len(where), device=device))
        for seq, where, at in tails
    ]
    pages, slots, chosen = (torch.cat(column).to(torch.int32) for column in zip(*parts, strict=True))
    write(arena, view, k, v, chosen, pages, slots)
    untouched = torch.ones_like(arena, dtype=torch.bool)
    for seq, where, at in tails:
        for which in range(len(view.data_offsets)):
            want = (k, v)[which][at : at + len(where)].view(len(where), view.kv_heads, view.dim).transpose(0, 1)
            got = rows(arena, view, table[seq], where, which, torch.int8 if view.scale_offsets else dtype)
            if view.scale_offsets:
                scale = scales(arena, view, table[seq], where, which)[..., None]
                # half a step of rounding, and the rounding of the quotient itself
                assert bool(((got * scale - want.float()).abs() <= 0.505 * scale).all()), (
                    "int8 rows are off by more than half a step"
                )
            else:
                assert torch.equal(got, want), "rows differ from what was written"
            mark(untouched, view, table[seq], where, which, view.dim * got.dtype.itemsize)
    assert torch.equal(arena[untouched], before[untouched]), "the writer touched bytes outside its rows"


def mark(
    untouched: torch.Tensor, view: LayerView, table: torch.Tensor, tokens: range, which: int, row_bytes: int
) -> None:
    """Note the bytes that the writer may change."""
    t = torch.arange(tokens.start, tokens.stop, device=table.device)
    slot = t % view.block_tokens
    sections = [(view.data_offsets[which], row_bytes)] + [
        (offset, 4) for offset in view.scale_offsets[which : which + 1]
    ]
    for offset, size in sections:
        base = table[t // view.block_tokens].to(torch.int64) * 256 + offset
        for head in range(view.kv_heads):
            start = base + (head * view.block_tokens + slot) * size
            untouched[(start[:, None] + torch.arange(size, device=table.device)).flatten()] = False
