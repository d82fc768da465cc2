"""Attention of a step's chunks in one layer: which kernel takes which of them is decided here, once.

What chunks can see of a coded past is decoded into scratch pages first, and then attended as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.mask import Mask
from windowpane.attention.segments import ChunkQueries, Large, Tiling, queries_of
from windowpane.attention.triton.prefill import prefill, prefill_tile_tokens
from windowpane.attention.triton.view import LayerView, PagedLayer
from windowpane.attention.triton.widen import PastPlan, plain_view, plan_past, widen
from windowpane.device.transfer import to_device
from windowpane.kv.hopper_scratch import CAPABILITY, LEAST_PROGRAMS, ROTARY_DIMS, WIDE_DIM, Heads
from windowpane.kv.layout import BLOCK_CHOICES


def heads_of(view: LayerView, query_heads: int, mask: Mask) -> Heads:
    return Heads(view.kv_heads, query_heads, view.dim, view.latent, mask.is_windowed, mask.is_chunked)


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


class ChunkAttention:
    """Without `scratch`, the plain kernel takes every chunk; with it, those with enough queries go to a Hopper kernel
    where the layer's heads have one.
    """

    def __init__(self, layer: PagedLayer, scratch: PrefillScratch | None) -> None:
        self._layer, view = layer, layer.view
        self.tiling = Tiling(prefill_tile_tokens(view, layer.query_heads))
        self._large = None
        heads = heads_of(view, layer.query_heads, layer.mask)
        rotates = layer.rope is None or layer.rope[0].shape[1] * 2 == ROTARY_DIMS
        # The Hopper kernels know no soft-cap, and that of the widest heads no sinks.
        knows_scores = layer.scores.softcap is None and (layer.scores.sinks is None or view.dim != WIDE_DIM)
        has_kernel = has_rows_for_hopper(view) and heads.has_kernel and rotates and knows_scores
        if scratch is not None and has_kernel:
            # Gluon's Hopper part is imported only where it can run.
            from windowpane.attention.hopper.prefill import HopperPrefill

            side_by_side = layer.query_heads // heads.boxed
            rows = scratch.rotated_rows if view.latent else None
            large = Large(heads.program_tokens, side_by_side, LEAST_PROGRAMS[view.dim], rows)
            self.tiling = Tiling(self.tiling.tokens, large)
            self._large = HopperPrefill(layer, heads, scratch)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunks: ChunkQueries, out: torch.Tensor
    ) -> None:
        """Rows as `prefill` takes them."""
        prefill(q, k, v, self._layer, chunks.segments, chunks.tiles[self.tiling], out)
        if self._large is not None:
            for launch in chunks.launches[self.tiling]:
                self._large(q, k, v, chunks.segments, launch, out)


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
        own = [s._replace(slot=i) for i, s in enumerate(chunks.host_segments[plan.first : plan.last])]
        return queries_of(own, [self.tiling], partial(_brought, device=self._layer.arena.device))()


def _brought(array: NDArray[np.int32], device: torch.device) -> Callable[[], torch.Tensor]:
    there = to_device(array, device)
    return lambda: there
