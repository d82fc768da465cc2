"""Prefill on Hopper from the host's side: some segments and one layer to a call."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from windowpane.attention.hopper.pair import pair_kernel
from windowpane.attention.hopper.prepare import copy_edges, rotate_keys
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.hopper.wide import wide_kernel
from windowpane.attention.segments import Launch
from windowpane.attention.triton.view import LayerView, PagedLayer, launch_registers
from windowpane.kv.hopper_scratch import PROGRAM_ROWS, ROTARY_DIMS, TILE_TOKENS, WIDE_DIM, Heads

ROWS = gl.NVMMASharedLayout(128, 16, rank=2)
HEADS = gl.NVMMASharedLayout(128, 16, rank=3)


class HopperPrefill:
    """One layer, whose heads have a kernel. Descriptors of its pages hold the arena's address, which never moves."""

    def __init__(self, layer: PagedLayer, heads: Heads, scratch: PrefillScratch) -> None:
        self._layer = layer
        view = layer.view
        self._heads = heads
        self._tile = TILE_TOKENS[view.dim]
        self._edges = scratch.edges(heads)
        # The widest kernel's four producers each bring a quarter of a tile.
        self._box = [self._tile, view.dim // 4 if view.dim == WIDE_DIM else view.dim]
        pages = [_described(_rows(layer.arena, view, x), [view.block_tokens, 64]) for x in view.data_offsets]
        tiles = [_described(x.reshape(-1, view.dim), self._box) for x in self._edges]
        self._sources = (pages[0], pages[-1], tiles[0], tiles[-1])
        # A pair's kernel does not look at it.
        self._rotated = scratch.rotated(heads) if view.latent else self._edges.view(1, -1, ROTARY_DIMS)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, launch: Launch,
        out: torch.Tensor,
    ) -> None:  # fmt: skip
        """As `triton.prefill.prefill`, for the segments of one launch."""
        layer, view, group = self._layer, self._layer.view, self._heads.boxed
        view.require_dtype(q)
        view.require_dtype(v)
        copy_edges(k, v, layer, segments, launch, self._tile, self._edges)
        heads_box = [64 // group, group, view.dim]
        asked = (TensorDescriptor.from_tensor(x, heads_box, HEADS) for x in (q, out))
        keys = v if view.latent else k
        fresh = (_described(x.view(len(x), -1), self._box) for x in (keys, v))
        programs = len(launch.tiles) * (layer.query_heads // group)
        shared = (layer.table, segments, launch.members, launch.tiles)
        table = (layer.table.stride(0), view.stripe, view.columns, view.kv_heads)
        if view.dim != WIDE_DIM:
            warp_groups = PROGRAM_ROWS[view.dim] // 64
            pair_kernel[(programs,)](
                *asked, out, layer.scores.sinks, *self._sources, *fresh, *shared, *table, layer.group // group,
                layer.scale_log2, WINDOW=layer.reach_tokens, OUT_STRIDE=out.stride(0), GROUP=group, DIM=view.dim,
                TILE=self._tile, BLOCK_TOKENS=view.block_tokens, STRIPES=view.stripes, WARP_GROUPS=warp_groups,
                num_warps=4, maxnreg=launch_registers(warp_groups),
            )  # fmt: skip
            return
        rotated, w = self._rotated, layer.table
        if layer.rope is not None:
            w = layer.rope[2]
            rotate_keys(v, layer, segments, launch, rotated)
        wide_kernel[(programs,)](
            *asked, out, *self._sources, *fresh,
            _described(rotated.view(-1, ROTARY_DIMS), [self._tile, ROTARY_DIMS]), w, *shared, *table, rotated.shape[1],
            layer.scale_log2, OUT_STRIDE=out.stride(0), GROUP=group, BLOCK_TOKENS=view.block_tokens,
            STRIPES=view.stripes, LATENT=view.latent, num_warps=4, maxnreg=launch_registers(3),
        )  # fmt: skip


def _rows(arena: torch.Tensor, view: LayerView, offset_bytes: int) -> torch.Tensor:
    """The arena as rows of this layer's width, counted from the slice of the page at its start."""
    row_bytes = view.dim * view.dtype.itemsize
    count = (arena.numel() - offset_bytes) // row_bytes
    return arena[offset_bytes : offset_bytes + count * row_bytes].view(view.dtype).view(count, view.dim)


def _described(rows: torch.Tensor, box: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, box, ROWS)
