"""Attention's launches of a step that begin while those ahead of them end, against the same in order, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from bench.gpu_checks.attention import DEVICE, LAYERS, Bare, random_arena
from bench.gpu_checks.attention_cases import Layer
from windowpane.attention.triton.decode import DecodeScratch, decode, decode_programs, plan_decode
from windowpane.lowering.gpu.kernels.heads import PageWrite, prepare_heads
from windowpane.lowering.gpu.kernels.norms import rms_norm

ARENA_BYTES = 2**30
TOKENS = 4096
EPS = 1e-6
DEPTH = 6  # times that one layer's attention makes the next one's projection
REPLAYS = 20


def checks() -> list[tuple[str, Callable[[], str]]]:
    return [
        (f"attention overlapped {name}, {rows} rows", partial(compare, LAYERS[name], rows))
        for name in ("31B window", "31B full, latent", "E4B full, pair")
        for rows in (1, 24)
    ]


class Steps:
    """A graph of projections, heads and attention in turn, over pages that it writes to."""

    def __init__(self, layer: Layer, rows: int, bare: Bare, weights: torch.Tensor, *, pdl: bool) -> None:
        self.layer, self.bare, self.weights, self.pdl = layer, bare, weights, pdl
        self.arena = bare.arena.clone()
        view, device = bare.view, torch.device(DEVICE)
        self.source = torch.zeros(rows, len(weights), dtype=torch.bfloat16, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int32, device=device)
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.norms = torch.ones(2, view.dim, device=device)
        if bare.rope is not None:
            self.angles, self.norms[1] = bare.rope[:2], bare.rope[2]
        else:
            angles = torch.arange(TOKENS, device=device)[:, None] * 0.7 ** torch.arange(16, device=device)
            self.angles = angles.cos(), angles.sin()
        self.scratch = DecodeScratch(rows, view.kv_heads, layer.group, view.dim, decode_programs(view, device), device)
        self._once()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self._once()

    def _once(self) -> torch.Tensor:
        layer, bare, view = self.layer, self.bare, self.bare.view
        rows = len(self.source)
        cum_tiles = torch.empty(rows + 1, dtype=torch.int32, device=DEVICE)
        plan_decode(self.positions, cum_tiles, layer.mask)
        x = self.source + 0.0  # a plain launch behind the plan
        for _ in range(DEPTH):
            projected = torch.empty_like(x)
            rms_norm(x, self.weights, EPS, projected, pdl=self.pdl)
            q = projected.new_empty(rows, layer.query_heads, view.dim)
            k = projected.new_empty(rows, view.kv_heads, view.dim)
            v, out = torch.empty_like(k), torch.empty_like(q)
            prepare_heads(
                projected, self.positions, *self.norms, q, k, v, v_norm=True, angles=self.angles,
                pair_distance=self.angles[0].shape[1] if view.latent else view.dim // 2, eps=EPS, latent=view.latent,
                page_write=PageWrite(self.arena, bare.table, view), slots=self.slots, pdl=self.pdl,
            )  # fmt: skip
            paged = replace(bare.for_kernels, arena=self.arena)
            decode(q, k, v, paged, self.slots, self.positions, cum_tiles, self.scratch, out, pdl=self.pdl)
            x = x.clone()
            x[:, : out[0].numel()] += out.flatten(1)
        return x

    def __call__(self, source: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.source.copy_(source)
        self.positions.copy_(positions)
        self.graph.replay()
        return self.out.clone()


def compare(layer: Layer, rows: int) -> str:
    """Bit for bit: what is attended, and the pages that were written."""
    bare = Bare.make(layer, rows, TOKENS, random_arena(ARENA_BYTES))
    kinds = 1 if bare.view.latent else 2
    width = (layer.query_heads + kinds * bare.view.kv_heads) * layer.dim
    weights = torch.rand(width, device=DEVICE) + 0.5
    overlapped, in_order = (Steps(layer, rows, bare, weights, pdl=pdl) for pdl in (True, False))
    for _ in range(REPLAYS):
        source = torch.randn(rows, width, device=DEVICE)
        positions = torch.randint(-1, TOKENS, (rows,), dtype=torch.int32)
        found, expected = overlapped(source, positions), in_order(source, positions)
        real = positions.to(DEVICE) >= 0
        if not bool(found[real].isfinite().all()):
            raise AssertionError("the output has NaN or Inf")
        if not torch.equal(found[real], expected[real]) or not torch.equal(overlapped.arena, in_order.arena):
            raise AssertionError("overlapped launches and launches in order differ")
    return f"{REPLAYS} replays equal"
