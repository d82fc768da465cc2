"""Chunks over a coded past: what they can see of it is decoded into scratch pages, and then attended as any other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from windowpane.attention.chunk_attention import ChunkAttention
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.segments import ChunkQueries
from windowpane.attention.triton.prefill import prefill_tiles
from windowpane.attention.triton.view import PagedLayer
from windowpane.attention.triton.widen import PastPlan, plain_view, plan_past, widen
from windowpane.device.transfer import to_device


def make_chunk_attention(
    layer: PagedLayer, scratch: PrefillScratch | None, decoded: torch.Tensor, dtype: torch.dtype
) -> ChunkAttention | CodedChunkAttention:
    """Of one layer, by what its pages hold. `decoded` and the activations' dtype matter where they hold codes."""
    if layer.view.code:
        return CodedChunkAttention(layer, scratch, decoded, dtype)
    return ChunkAttention(layer, scratch)


class CodedChunkAttention:
    """As `ChunkAttention`, for pages that hold codes. `decoded` is memory that layers share, since they run in turn."""

    def __init__(
        self, layer: PagedLayer, scratch: PrefillScratch | None, decoded: torch.Tensor, dtype: torch.dtype
    ) -> None:
        self._layer, self._scratch, self._decoded, self._dtype = layer, scratch, decoded, dtype
        plain = replace(layer, arena=decoded, view=plain_view(layer.view, dtype))
        self.tiling = ChunkAttention(plain, scratch).tiling

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunks: ChunkQueries, out: torch.Tensor
    ) -> None:
        """Rows as `ChunkAttention` takes them; K and V of the present went through the format already."""
        for plan, asking in self._goes(chunks):
            plain = widen(self._layer, chunks.segments, plan, self._decoded, self._dtype)
            ChunkAttention(plain, self._scratch)(q, k, v, asking, out)

    def _goes(self, chunks: ChunkQueries) -> list[tuple[PastPlan, ChunkQueries]]:
        """Which chunks' past is decoded at a time, and these chunks in the scratch; the same for layers that are alike.

        In the scratch a chunk has its own number for a slot.
        """
        view = self._layer.view
        key = (view.kv_heads, view.dim, view.block_tokens, view.latent, self._layer.mask, self.tiling)
        if key not in chunks.goes:
            segments = np.array(chunks.host_segments, dtype=np.int32)
            plans = plan_past(segments, self._layer, self._dtype, self._decoded.numel())
            chunks.goes[key] = [(plan, self._alone(plan, chunks)) for plan in plans]
        return chunks.goes[key]

    def _alone(self, plan: PastPlan, chunks: ChunkQueries) -> ChunkQueries:
        own = tuple(s._replace(slot=i) for i, s in enumerate(chunks.host_segments[plan.first : plan.last]))
        tiles = chunks.tiles[self.tiling]
        if len(own) < len(chunks.host_segments):
            asking = self.tiling.queries(np.array(own, dtype=np.int32))
            tiles = to_device(prefill_tiles(asking, self.tiling.tokens), self._layer.arena.device)
        return ChunkQueries(plan.segments, own, {self.tiling: tiles})
