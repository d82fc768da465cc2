"""What is made ready for the Hopper kernels, in a process with TRITON_INTERPRET=1: float32, rows of no token NaN."""

from __future__ import annotations

import sys
import warnings

import torch

from bench.gpu_checks.attention_cases import Layer, Paged, error, fused_rows, make_pages, rebuild
from windowpane.attention.hopper.prepare import copy_edges, rotate_keys
from windowpane.schedule.step import Segment

FLOAT = torch.float32
ROW = 3  # of the first token of the segment


def edges() -> None:
    """Each row of the two tiles is a token that may be seen, or 0."""
    for layer, tile in (
        (Layer(2, 1, 64, window_tokens=100, block_tokens=32, stripes=2), 64),
        (Layer(2, 1, 64, window_tokens=20), 128),
        (Layer(1, 2, 64, block_tokens=64), 64),
        (Layer(1, 2, 64, rotary=8), 64),
    ):
        for past, tokens in ((0, 70), (64, 5), (70, 100), (333, 10), (128 + 99, 40)):
            paged = make_pages(layer, [past, 9], "cpu", FLOAT, room_tokens=tokens)
            view = paged.view
            segment, k, v = _segment(paged, tokens)
            out = torch.full((len(view.data_offsets), 2, view.kv_heads, tile, view.dim), float("nan"))
            copy_edges(k, v, paged.for_kernels, segment, tile, out)
            present = [v] if view.latent else [k, v]
            for vector, fresh in enumerate(present):
                known = torch.cat([paged.past[0][vector], fresh[ROW : ROW + tokens]])
                first = layer.mask.first_visible(past)
                wanted = [first // tile if first % tile else None, past // tile if past % tile else None]
                for which, at in enumerate(wanted):
                    if at is None:
                        continue
                    want = torch.zeros(tile, view.kv_heads, view.dim)
                    for t in range(max(first, at * tile), min(past + tokens, at * tile + tile)):
                        want[t - at * tile] = known[t]
                    assert torch.equal(out[vector, which].transpose(0, 1), want), (layer, past, which)


def rotated() -> None:
    layer = Layer(2, 4, 64, rotary=8, block_tokens=32)
    for past, tokens in ((0, 65), (70, 65), (64, 64)):
        paged = make_pages(layer, [past, 9], "cpu", FLOAT, room_tokens=tokens)
        segment, _, v = _segment(paged, tokens)
        assert paged.rope is not None
        out = torch.full((2, 192, 16), float("nan"))
        rotate_keys(v, paged.for_kernels, segment, out)
        known = torch.cat([paged.past[0][0], v[ROW : ROW + tokens]])
        want = rebuild(known, paged.rope, torch.arange(past + tokens), torch.float64)[..., :16].transpose(0, 1)
        assert error(out[:, : past + tokens], want) < 1e-6
        end = -(-(past + tokens) // 64) * 64
        assert bool((out[:, past + tokens : end] == 0).all()), "rows up to a whole tile must be 0"
        assert bool(out[:, end:].isnan().all()), "rows beyond the segment were written"


def _segment(paged: Paged, tokens: int) -> tuple[Segment, torch.Tensor, torch.Tensor]:
    past = paged.lengths[0]
    _, k, v = fused_rows(paged.layer, ROW + tokens + 1, "cpu", FLOAT)
    for x in (k, v):
        x[:ROW], x[-1] = float("nan"), float("nan")
    return Segment(paged.slots[0], past, past + tokens, ROW, ROW, tokens), k, v


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
    torch.manual_seed(0)
    {"edges": edges, "rotated": rotated}[sys.argv[1]]()
