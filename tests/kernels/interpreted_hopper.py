"""What is made ready for the Hopper kernels, in a process with TRITON_INTERPRET=1, where rows of no token are NaN; and
the kernels, whose source runs in torch.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from itertools import accumulate

import torch

from bench.gpu_checks import attention_cases
from bench.gpu_checks.attention import judge
from bench.gpu_checks.attention_cases import Layer, Paged, error, fused_rows, make_pages, rebuild, run_prefill
from bench.gpu_checks.hopper import heads_of
from tests.kernels.gluon_in_torch import Interpreted
from tests.kernels.hopper_in_torch import WITH_COLUMNS
from windowpane.attention.hopper import prefill as hopper
from windowpane.attention.hopper.prepare import copy_edges, rotate_keys
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.segments import Launch
from windowpane.kv.hopper_scratch import LEAST_PROGRAMS
from windowpane.schedule.step import Segment

FLOAT = torch.float32
ROW = 3  # of the first token of the first segment


def edges() -> None:
    """Each row of the three tiles is a token that may be seen, or 0; tiles of whole rows are left alone."""
    for layer, tile in (
        (Layer(2, 1, 64, window_tokens=100, block_tokens=32, stripes=2), 64),
        (Layer(2, 1, 64, window_tokens=20), 128),
        (Layer(1, 2, 64, block_tokens=64), 64),
        (Layer(1, 2, 64, rotary=8), 64),
    ):
        pasts, counts = (0, 64, 70, 333, 128 + 99), (70, 64, 100, 10, 29)
        paged, segments, k, v = _segments(layer, pasts, counts)
        view, taken = paged.view, [3, 0, 1, 4, 2]
        launch = Launch(torch.tensor([(i, 0) for i in taken], dtype=torch.int32), None, max(pasts) + 100)
        out = torch.full((len(view.data_offsets), 8, 3, view.kv_heads, tile, view.dim), float("nan"))
        copy_edges(k, v, paged.for_kernels, torch.tensor(segments, dtype=torch.int32), launch, tile, out)
        for member, index in enumerate(taken):
            slot_past, segment = paged.past[index], segments[index]
            first = layer.mask.first_visible(segment.start)
            for vector, fresh in enumerate([v] if view.latent else [k, v]):
                known = torch.cat([slot_past[vector], fresh[segment.rows]])
                for which, at in enumerate((first, segment.start, segment.stop)):
                    found = out[vector, member, which].transpose(0, 1)
                    if at % tile == 0:
                        assert bool(found.isnan().all())
                        continue
                    begin = at // tile * tile
                    want = torch.zeros(tile, view.kv_heads, view.dim)
                    for t in range(max(first, begin), min(segment.stop, begin + tile)):
                        want[t - begin] = known[t]
                    assert torch.equal(found, want), (layer, segment, which)
        assert bool(out[:, len(taken) :].isnan().all())


def rotated() -> None:
    layer = Layer(2, 4, 64, rotary=8, block_tokens=32)
    paged, segments, _, v = _segments(layer, (0, 70, 64), (65, 65, 64))
    assert paged.rope is not None
    firsts, taken = [256, 0, 448], [2, 0, 1]
    members = torch.tensor([(i, firsts[i]) for i in taken], dtype=torch.int32)
    out = torch.full((2, 640, 16), float("nan"))
    rotate_keys(v, paged.for_kernels, torch.tensor(segments, dtype=torch.int32), Launch(members, None, 135), out)
    written = torch.zeros(640, dtype=torch.bool)
    for segment, first, past in zip(segments, firsts, paged.past, strict=True):
        own, end = out[:, first:], -(-segment.stop // 64) * 64
        known = torch.cat([past[0], v[segment.rows]])
        want = rebuild(known, paged.rope, torch.arange(segment.stop), torch.float64)[..., :16].transpose(0, 1)
        assert error(own[:, : segment.stop], want) < 1e-6
        assert bool((own[:, segment.stop : end] == 0).all()), "rows up to a whole tile must be 0"
        written[first : first + end] = True
    assert bool(out[:, ~written].isnan().all()), "rows beyond the segments were written"


LAYERS = {
    "a window, edges": (Layer(1, 2, 64, window_tokens=100), (70, 200, 0, 333)),
    "sinks, 3 query heads": (Layer(2, 3, 64, has_sinks=True), (5, 130)),
    "128 dims": (Layer(1, 4, 128), (128, 7)),
    "256 dims, a window, larger blocks": (Layer(2, 2, 256, window_tokens=70, block_tokens=32, stripes=2), (100, 64)),
    "512 dims, latent": (Layer(2, 16, 512, rotary=64), (70, 0, 64)),
    "512 dims, pair": (Layer(1, 8, 512), (37, 64)),
}


def attended() -> None:
    """The kernels' sources in torch: several segments to a launch, that end within tiles of queries and of keys. The
    last has few tokens, and goes along.
    """
    attention_cases.kernel_arena = lambda paged: paged.arena  # type: ignore[assignment]  # which descriptors are of
    LEAST_PROGRAMS.update(dict.fromkeys(LEAST_PROGRAMS, 1))
    hopper.pair_kernel = Interpreted(hopper.pair_kernel, WITH_COLUMNS)
    hopper.wide_kernel = Interpreted(hopper.wide_kernel, WITH_COLUMNS)
    for name, (layer, pasts) in LAYERS.items():
        heads = heads_of(layer)
        tokens = heads.program_tokens
        counts = [(2 * tokens + 1 + i * (tokens - 3), 2 * tokens + i * (tokens - 3)) for i in range(len(pasts) - 1)]
        counts.append((5, 2))
        paged = make_pages(layer, list(pasts), "cpu", torch.bfloat16, room_tokens=4 * tokens + 64)
        scratch = PrefillScratch([heads], 1024, torch.device("cpu"))
        for x in (scratch.edges(heads), *([scratch.rotated(heads)] if layer.rotary else [])):
            x.fill_(float("nan"))
        print(name, judge(*run_prefill(paged, counts, scratch)), flush=True)


def _segments(
    layer: Layer, pasts: Sequence[int], counts: Sequence[int]
) -> tuple[Paged, list[Segment], torch.Tensor, torch.Tensor]:
    """Behind rows that nobody may read."""
    paged = make_pages(layer, list(pasts), "cpu", FLOAT, room_tokens=max(counts))
    rows = list(accumulate(counts, initial=ROW))
    _, k, v = fused_rows(paged.layer, rows[-1] + 1, "cpu", FLOAT)
    for x in (k, v):
        x[:ROW], x[-1] = float("nan"), float("nan")
    found = zip(paged.slots, pasts, counts, rows, strict=False)
    return paged, [Segment(slot, past, past + n, row, row, n) for slot, past, n, row in found], k, v


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
    torch.manual_seed(0)
    {"edges": edges, "rotated": rotated, "attended": attended}[sys.argv[1]]()
