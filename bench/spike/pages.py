"""Gemma 4 31B as the layout core lays it out, and arenas of random pages to read from.

The only place in the spike that knows offsets; kernels get them as numbers.
"""

from dataclasses import dataclass

import torch

from windowpane.kv.caches import TokenCache
from windowpane.kv.formats import kv_format
from windowpane.kv.layout import OFFSET_UNIT_BYTES, Group, Layout, plan_layout
from windowpane.kv.retention import Full, Window

QUERY_HEADS = 32
WINDOW_TOKENS = 1024
ROTARY_PAIRS = 64  # of the 256 of a 512-dim head; contiguous after loading: dims [0:64) and [64:128)


def gemma4_layout(fmt: str = "bfloat16", block_tokens: int | None = 16, latent: bool = True) -> Layout:
    """50 sliding layers (16 KV heads x 256, pair) and 10 full ones (4 KV heads x 512, latent or, if asked, pair)."""
    caches = [
        TokenCache(layer, Full(), 4, 512, 512, latent)
        if layer % 6 == 5
        else TokenCache(layer, Window(WINDOW_TOKENS), 16, 256, 256)
        for layer in range(60)
    ]
    formats = {cache.retention.name: kv_format(fmt) for cache in caches}
    return plan_layout(caches, formats, block_tokens=block_tokens)


@dataclass(frozen=True)
class LayerView:
    """What a kernel needs to find one layer in a page: all offsets in bytes from the start of the page."""

    block_tokens: int
    page_bytes: int
    kv_heads: int
    dim: int
    data_offsets: tuple[int, ...]
    scale_offsets: tuple[int, ...]

    @property
    def latent(self) -> bool:
        return len(self.data_offsets) == 1


def layer_view(group: Group, index: int) -> LayerView:
    piece = group.slices[index]
    assert group.block_tokens is not None
    return LayerView(
        group.block_tokens,
        group.page_bytes,
        piece.cache.kv_heads,
        piece.cache.key_dim,
        piece.data_offsets,
        piece.scale_offsets,
    )


def random_tables(
    view: LayerView, lengths: list[int], arena_bytes: int, device: str, pages_per_slab: int = 1
) -> torch.Tensor:
    """Page tables over slabs in random order: int32 offsets in 256-byte units, one row per sequence.

    With one page to a slab, pages are scattered as badly as they can be. Entries past a sequence's last page repeat an
    offset of its own: kernels may prefetch them, never use them.
    """
    pages = [-(-n // view.block_tokens) for n in lengths]
    total, slots = sum(pages), arena_bytes // view.page_bytes // pages_per_slab * pages_per_slab
    if total > slots:
        raise ValueError(f"{total:,} pages of {view.page_bytes:,} B do not fit into {arena_bytes:,} B")
    slabs = torch.randperm(slots // pages_per_slab, device=device)[:, None] * pages_per_slab
    order = (slabs + torch.arange(pages_per_slab, device=device)).flatten() * (view.page_bytes // OFFSET_UNIT_BYTES)
    width = max(pages) + 64 // min(view.block_tokens, 64)
    table = torch.zeros(len(lengths), width, dtype=torch.int64, device=device)
    first = 0
    for i, count in enumerate(pages):
        table[i, :count] = order[first : first + count]
        table[i, count:] = order[first]
        first += count
    return table.to(torch.int32)


def rows(
    arena: torch.Tensor, view: LayerView, table: torch.Tensor, tokens: range, which: int, dtype: torch.dtype
) -> torch.Tensor:
    """[kv_heads, tokens, dim] of one sequence (`table` is its row), gathered in plain torch: the reference's way in.

    `which`: 0 for K or the latent, 1 for V.
    """
    return arena.view(dtype)[_elements(view, table, tokens, view.data_offsets[which], view.dim, dtype.itemsize)]


def scales(arena: torch.Tensor, view: LayerView, table: torch.Tensor, tokens: range, which: int) -> torch.Tensor:
    """[kv_heads, tokens] float32 scales of a quantised layer."""
    return arena.view(torch.float32)[_elements(view, table, tokens, view.scale_offsets[which], 1, 4)][..., 0]


def write_rows(
    arena: torch.Tensor, view: LayerView, table: torch.Tensor, tokens: range, which: int, values: torch.Tensor
) -> None:
    """The reference's way out: overwrite rows [kv_heads, tokens, dim] of one sequence."""
    index = _elements(view, table, tokens, view.data_offsets[which], view.dim, values.dtype.itemsize)
    arena.view(values.dtype)[index] = values


def _elements(
    view: LayerView, table: torch.Tensor, tokens: range, offset: int, width: int, item_bytes: int
) -> torch.Tensor:
    """Element numbers of rows of `width` elements in a section that starts at `offset`: [kv_heads, tokens, width]."""
    device = table.device
    t = torch.arange(tokens.start, tokens.stop, device=device)
    base = table[t // view.block_tokens].to(torch.int64) * OFFSET_UNIT_BYTES + offset
    head = torch.arange(view.kv_heads, device=device)[:, None] * view.block_tokens
    row = head + (t % view.block_tokens)[None]
    start = base[None] // item_bytes + row * width
    return start[..., None] + torch.arange(width, device=device)
