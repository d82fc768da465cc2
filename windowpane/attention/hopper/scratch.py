"""What the Hopper kernels write for themselves: allocated once, shared by all layers, since they run in turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from windowpane.kv.hopper_scratch import (
    EDGES,
    LAUNCH_SEGMENTS,
    ROTARY_DIMS,
    TILE_TOKENS,
    Heads,
    rotated_rows,
    scratch_elements,
)


class PrefillScratch:
    """For `layers` and sequences of up to `max_model_len` tokens."""

    def __init__(self, layers: Sequence[Heads], max_model_len: int, device: torch.device) -> None:
        edges, rotated = scratch_elements(layers, max_model_len)
        self._edges = torch.empty(edges, dtype=torch.bfloat16, device=device)
        self._rotated = torch.empty(rotated, dtype=torch.bfloat16, device=device)
        self.rotated_rows = rotated_rows(max_model_len)

    @property
    def bytes(self) -> int:
        return self._edges.nbytes + self._rotated.nbytes

    def edges(self, heads: Heads) -> torch.Tensor:
        """[vectors, segments, edges, KV heads, tile tokens, dim]."""
        tile = (heads.kv_heads, TILE_TOKENS[heads.dim], heads.dim)
        shape = (1 if heads.latent else 2, LAUNCH_SEGMENTS, EDGES, *tile)
        return self._edges[: heads.edge_elements].view(shape)

    def rotated(self, heads: Heads) -> torch.Tensor:
        """[KV heads, positions, rotary dims] of a latent."""
        elements = heads.kv_heads * self.rotated_rows * ROTARY_DIMS
        return self._rotated[:elements].view(heads.kv_heads, self.rotated_rows, ROTARY_DIMS)
