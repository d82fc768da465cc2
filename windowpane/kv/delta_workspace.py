"""Scratch of Gated DeltaNet over segments, which go through it in strips of chunks. Without torch: plans ask too."""

from __future__ import annotations

from math import prod
from typing import Protocol

from windowpane.kv.retention import ceil_div

CHUNK_TOKENS = 64
STRIP_TOKENS = 4096
FLOAT32_BYTES = 4
_ALIGNED_BYTES = 256


class DeltaSizes(Protocol):
    """Heads and dims of a layer."""

    @property
    def key_heads(self) -> int: ...
    @property
    def value_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...


def workspace_pieces(sizes: DeltaSizes, compute_bytes: int, chunks: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape of each piece and bytes of an element: those of float32, or of the compute dtype."""
    tokens, heads = chunks * CHUNK_TOKENS, sizes.value_heads
    return {
        # One is read in a strip, the other written: both may belong to segments of that strip.
        "carried": ((2, heads, sizes.key_dim, sizes.value_dim), FLOAT32_BYTES),
        "totals": ((heads, tokens), FLOAT32_BYTES),  # logs (of base 2) of the decay since the chunk's first token
        # The rest by chunk and head. Queries and keys.
        "pairs": ((2, chunks, sizes.key_heads, CHUNK_TOKENS, sizes.key_dim), compute_bytes),
        # Then what is learned from an empty state, dim by dim.
        "values": ((chunks, heads, CHUNK_TOKENS, sizes.value_dim), compute_bytes),
        "known": ((chunks, heads, CHUNK_TOKENS, sizes.key_dim), compute_bytes),
        "inside": ((chunks, heads, CHUNK_TOKENS, CHUNK_TOKENS), compute_bytes),
    }


def piece_bytes(shape: tuple[int, ...], element_bytes: int) -> int:
    return ceil_div(prod(shape) * element_bytes, _ALIGNED_BYTES) * _ALIGNED_BYTES


def delta_workspace_bytes(sizes: DeltaSizes, compute_bytes: int, tokens: int = STRIP_TOKENS) -> int:
    """What strips of so many tokens take; that of one chunk is the least."""
    chunks = max(1, ceil_div(tokens, CHUNK_TOKENS))
    return sum(piece_bytes(*piece) for piece in workspace_pieces(sizes, compute_bytes, chunks).values())
