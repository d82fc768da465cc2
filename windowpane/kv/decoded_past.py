"""Scratch for chunks whose past lies in pages as codes: they read it decoded. Without torch: plans ask too."""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.kv.formats import dtype_bytes
from windowpane.kv.layout import Layout

# Chunks of several sequences are decoded together up to this much; a longer past is decoded alone.
TOGETHER_BYTES = 2**28


def decoded_past_bytes(layout: Layout, compute_dtype: str, max_model_len: int) -> int:
    """Scratch of the layer that needs most, since layers run in turn; 0 where no pages are coded."""
    longest_bytes = 0
    for group in layout.groups:
        if group.kv_format is None or group.kv_format.family == "float":
            continue
        held_tokens = group.max_pages(max_model_len) // group.stripes * (group.block_tokens or 0)
        for piece in group.slices:
            assert isinstance(piece.cache, TokenCache)
            token_bytes = piece.cache.kv_heads * sum(piece.cache.row_dims) * dtype_bytes(compute_dtype)
            longest_bytes = max(longest_bytes, held_tokens * token_bytes)
    return max(longest_bytes, TOGETHER_BYTES) if longest_bytes else 0
