"""Attention of a step's chunks in one layer: which kernel takes which of them is decided here, once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.mask import Mask
from windowpane.attention.segments import ChunkQueries, Tiling
from windowpane.attention.triton.prefill import prefill, prefill_tile_tokens
from windowpane.attention.triton.view import LayerView, PagedLayer
from windowpane.kv.hopper_scratch import CAPABILITY, ROTARY_DIMS, Heads
from windowpane.kv.layout import BLOCK_CHOICES


def heads_of(view: LayerView, query_heads: int, mask: Mask) -> Heads:
    return Heads(view.kv_heads, query_heads, view.dim, view.latent, mask.window_tokens is not None)


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
        # The Hopper kernels know neither soft-cap nor sinks.
        has_kernel = has_rows_for_hopper(view) and heads.has_kernel and rotates and layer.scores.are_plain
        if scratch is not None and has_kernel:
            # Gluon's Hopper part is imported only where it can run.
            from windowpane.attention.hopper.prefill import HopperPrefill

            self.tiling = Tiling(self.tiling.tokens, heads.least_queries)
            self._large = HopperPrefill(layer, heads, scratch)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunks: ChunkQueries, out: torch.Tensor
    ) -> None:
        """Rows as `prefill` takes them."""
        prefill(q, k, v, self._layer, chunks.segments, chunks.tiles[self.tiling], out)
        if self._large is None or self.tiling.below_queries is None:
            return
        for segment in chunks.host_segments:
            if segment.q_count >= self.tiling.below_queries:
                self._large(q, k, v, segment, out)
