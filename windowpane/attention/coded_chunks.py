"""Chunks over a coded past: what they can see of it is decoded into scratch pages, and then attended as any other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from windowpane.attention.chunk_attention import ChunkAttention
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.triton.prefill import prefill_tiles
from windowpane.attention.triton.view import LayerView, Rope
from windowpane.attention.triton.widen import PastPlan, plain_view, plan_past, widen
from windowpane.device.transfer import to_device
from windowpane.lowering.gpu.step import ChunkQueries


def make_chunk_attention(
    arena: torch.Tensor,
    view: LayerView,
    table: torch.Tensor,
    query_heads: int,
    *,
    scale: float,
    window_tokens: int | None,
    rope: Rope | None,
    scratch: PrefillScratch | None,
    decoded: torch.Tensor,
    dtype: torch.dtype,
) -> ChunkAttention | CodedChunkAttention:
    """Of one layer, by what its pages hold. `decoded` and the activations' dtype matter where they hold codes."""
    made: Callable[..., ChunkAttention | CodedChunkAttention] = ChunkAttention
    if view.code:
        made = partial(CodedChunkAttention, decoded=decoded, dtype=dtype)
    return made(arena, view, table, query_heads, scale=scale, window_tokens=window_tokens, rope=rope, scratch=scratch)


class CodedChunkAttention:
    """As `ChunkAttention`, for pages that hold codes. `decoded` is memory that layers share, since they run in turn."""

    def __init__(
        self,
        arena: torch.Tensor,
        view: LayerView,
        table: torch.Tensor,
        query_heads: int,
        *,
        scale: float,
        window_tokens: int | None,
        rope: Rope | None,
        scratch: PrefillScratch | None,
        decoded: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        self._arena, self._view, self._table, self._dtype = arena, view, table, dtype
        self._query_heads, self._scale, self._rope = query_heads, scale, rope
        self._window_tokens, self._scratch, self._decoded = window_tokens, scratch, decoded
        self.tiling = self._over(plain_view(view, dtype), table).tiling

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunks: ChunkQueries, out: torch.Tensor
    ) -> None:
        """Rows as `ChunkAttention` takes them; K and V of the present went through the format already."""
        for plan, asking in self._goes(chunks):
            plain = widen(
                self._arena, self._view, self._table, chunks.segments, plan, self._decoded, self._dtype,
                self._window_tokens,
            )  # fmt: skip
            self._over(plain, plan.table)(q, k, v, asking, out)

    def _over(self, plain: LayerView, table: torch.Tensor) -> ChunkAttention:
        return ChunkAttention(
            self._decoded, plain, table, self._query_heads, scale=self._scale, window_tokens=self._window_tokens,
            rope=self._rope, scratch=self._scratch,
        )  # fmt: skip

    def _goes(self, chunks: ChunkQueries) -> list[tuple[PastPlan, ChunkQueries]]:
        """Which chunks' past is decoded at a time, and these chunks in the scratch; the same for layers that are alike.

        In the scratch a chunk has its own number for a slot.
        """
        view = self._view
        key = (view.kv_heads, view.dim, view.block_tokens, view.latent, self._window_tokens, self.tiling)
        if key not in chunks.goes:
            segments = np.array(chunks.host_segments, dtype=np.int32)
            plans = plan_past(
                segments, view, self._dtype, self._window_tokens, self._arena.device, self._decoded.numel()
            )
            chunks.goes[key] = [(plan, self._alone(plan, chunks)) for plan in plans]
        return chunks.goes[key]

    def _alone(self, plan: PastPlan, chunks: ChunkQueries) -> ChunkQueries:
        own = tuple(s._replace(slot=i) for i, s in enumerate(chunks.host_segments[plan.first : plan.last]))
        tiles = chunks.tiles[self.tiling]
        if len(own) < len(chunks.host_segments):
            asking = self.tiling.queries(np.array(own, dtype=np.int32))
            tiles = to_device(prefill_tiles(asking, self.tiling.tokens), self._arena.device)
        return ChunkQueries(plan.segments, own, {self.tiling: tiles})
