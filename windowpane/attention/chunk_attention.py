"""Attention of a step's chunks in one layer: which kernel takes which of them is decided here, once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from windowpane.attention.device_step import ChunkQueries
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.hopper.sizes import CAPABILITY, ROTARY_DIMS, Heads
from windowpane.attention.segments import ChunkSegment, Tiling
from windowpane.attention.triton.prefill import prefill, prefill_tile_tokens, prefill_tiles
from windowpane.attention.triton.view import LayerView, Rope
from windowpane.attention.triton.widen import PastPlan, plain_view, plan_past, widen
from windowpane.kv.layout import BLOCK_CHOICES, DECODED_PAST_BYTES

if TYPE_CHECKING:
    from windowpane.attention.hopper.prefill import HopperPrefill


def heads_of(view: LayerView, query_heads: int, window_tokens: int | None) -> Heads:
    return Heads(view.kv_heads, query_heads, view.dim, view.latent, window_tokens is not None)


def hopper_scratch(
    layers: Iterable[tuple[LayerView, Heads]], max_model_len: int, device: torch.device
) -> PrefillScratch | None:
    """What the Hopper kernels need for these layers; None where the device is another one."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != CAPABILITY:
        return None
    return PrefillScratch([heads for view, heads in layers if has_rows_for_hopper(view)], max_model_len, device)


def has_rows_for_hopper(view: LayerView) -> bool:
    """Whole pages make a tile, and rows are bf16."""
    return view.dtype == torch.bfloat16 and view.block_tokens in BLOCK_CHOICES


def plain_rows(view: LayerView, dtype: torch.dtype) -> LayerView:
    """The pages that chunks of this layer read: its own, or those that its coded past is decoded into."""
    return plain_view(view, dtype) if view.code else view


class ChunkAttention:
    """Without `scratch`, the plain kernel takes every chunk; with it, those with enough queries go to a Hopper kernel
    where the layer's heads have one. What of a coded past the chunks can see is decoded first, into pages as any other.
    """

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
        dtype: torch.dtype,
        decoded_past_bytes: int = DECODED_PAST_BYTES,
    ) -> None:
        self._arena, self._view, self._table, self._dtype = arena, view, table, dtype
        self._scale, self._window_tokens, self._rope = scale, window_tokens, rope
        self._decoded_past_bytes = decoded_past_bytes
        rows = plain_rows(view, dtype)
        self.tiling = Tiling(prefill_tile_tokens(rows, query_heads))
        self._heads = heads_of(view, query_heads, window_tokens)
        self._scratch = scratch
        self._large: HopperPrefill | None = None
        turns = rope is None or rope[0].shape[1] * 2 == ROTARY_DIMS
        if scratch is not None and has_rows_for_hopper(rows) and self._heads.has_kernel and turns:
            self.tiling = Tiling(self.tiling.tokens, self._heads.least_queries)
            if not view.code:
                self._large = self._hopper(arena, view, table)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunks: ChunkQueries, out: torch.Tensor
    ) -> None:
        """Rows as `prefill` takes them."""
        if not self._view.code:
            tiles = chunks.tiles[self.tiling]
            self._plain(q, k, v, self._arena, self._view, self._table, chunks.segments, tiles, out)
            for segment in self._large_segments(chunks.host_segments):
                assert self._large is not None
                self._large(q, k, v, segment, out)
            return
        for plan in self._plans(chunks):
            pages, view = widen(
                self._arena, self._view, self._table, chunks.segments, plan, self._dtype, self._window_tokens
            )
            tiles = chunks.tiles[self.tiling]
            host_segments = chunks.host_segments[plan.first : plan.last]
            if len(host_segments) < len(chunks.host_segments):
                asking = self.tiling.queries(np.array(host_segments, dtype=np.int32))
                tiles = torch.from_numpy(prefill_tiles(asking, self.tiling.tokens)).to(tiles.device)
            self._plain(q, k, v, pages, view, plan.table, plan.segments, tiles, out)
            own = [segment._replace(slot=number) for number, segment in enumerate(host_segments)]
            for segment in self._large_segments(own):
                self._hopper(pages, view, plan.table)(q, k, v, segment, out)

    def _plain(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arena: torch.Tensor, view: LayerView,
        table: torch.Tensor, segments: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor,
    ) -> None:  # fmt: skip
        prefill(
            q, k, v, arena, view, table, segments, tiles, out, scale=self._scale,
            window_tokens=self._window_tokens, rope=self._rope,
        )  # fmt: skip

    def _large_segments(self, segments: Iterable[ChunkSegment]) -> Iterator[ChunkSegment]:
        below = self.tiling.below_queries
        return (s for s in segments if below is not None and s.q_count >= below)

    def _hopper(self, arena: torch.Tensor, view: LayerView, table: torch.Tensor) -> HopperPrefill:
        # Gluon's Hopper part is imported only where it can run.
        from windowpane.attention.hopper.prefill import HopperPrefill

        assert self._scratch is not None
        return HopperPrefill(
            arena, view, table, self._heads, self._scratch, scale=self._scale, window_tokens=self._window_tokens,
            rope=self._rope,
        )  # fmt: skip

    def _plans(self, chunks: ChunkQueries) -> list[PastPlan]:
        """Layers of one shape share them."""
        key = (self._view.kv_heads, self._view.dim, self._view.block_tokens, self._view.latent, self._window_tokens)
        if key not in chunks.past_plans:
            segments = np.array(chunks.host_segments, dtype=np.int32)
            chunks.past_plans[key] = plan_past(
                segments, self._view, self._dtype, self._window_tokens, self._arena.device, self._decoded_past_bytes
            )
        return chunks.past_plans[key]
