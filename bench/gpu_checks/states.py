"""Gated DeltaNet on a GPU: checked against float64, timed against the bytes and operations it cannot do without.

Inputs are new in every run, outputs hold NaN before, and pages that no sequence writes must stay as they are.

    python3 -m bench.gpu_checks.states                   checks and tables of times
    python3 -m bench.gpu_checks.states table             times as planned, each launch of a prompt by itself
    python3 -m bench.gpu_checks.states sweep [NAME …]    other launches: decode, drafts, solve, pass, convolve, strips

fla-core is timed beside it where it can be imported, also from a folder `.fla` (its wheel, unpacked, and einops).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, cycle
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from bench.gpu_checks.fused import CUDA, Checks
from bench.timing import exclusive_times, microseconds
from windowpane.attention.segments import ChunkQueries
from windowpane.kv.layout import OFFSET_UNIT_BYTES
from windowpane.lowering.gpu.kernels.delta import DecodeLaunch, DeltaShape, decode_delta, plan_decode
from windowpane.lowering.gpu.kernels.delta_chunks import (
    LAUNCH,
    STRIP_TOKENS,
    ChunkLaunch,
    chunk_delta,
    delta_workspace_bytes,
)
from windowpane.lowering.gpu.kernels.state_places import StatePart, StatePlaces, snapshot_tables
from windowpane.lowering.reference.recurrence import L2_EPS
from windowpane.schedule.step import Segment

BF16, F32 = torch.bfloat16, torch.float32
EPS = 1e-6
ROOF_TB = 4.8
ROWS = (1, 8, 64, 256)
DRAFTED_ROWS = 5  # of a sequence with drafts
LAYERS = {"Qwen3.5-35B-A3B": DeltaShape(16, 32, 128, 128, 4), "Qwen3.5-27B": DeltaShape(16, 48, 128, 128, 4)}
SMALL_HEADS = (
    (16, 16), (16, 32), (32, 16), (64, 16), (128, 16), (16, 128), (32, 32), (32, 64), (64, 32), (128, 32), (64, 64),
)  # fmt: skip
# Relative errors: of outputs, whose last rounding alone is 1.7e-3 in bf16, and of states.
ALLOWED = {("decode", BF16): (4e-3, 1e-5), ("decode", F32): (1e-5, 1e-5), ("chunks", BF16): (1e-2, 1e-2),
           ("chunks", F32): (3e-5, 3e-5)}  # fmt: skip
# Lengths and starts of segments.
PROMPTS = {
    "one of 8192": ((8192,), (0,)),
    "one of 1000, begun": ((1000,), (4000,)),
    "mixed": ((1, 63, 64, 65, 1000, 3, 2049), (0, 7, 0, 9000, 1, 3, 64)),
    "40 of 2 to 80": (tuple(range(2, 82, 2)), tuple(i % 3 for i in range(40))),
}
TIMED_PROMPTS = {"1 × 8192": (8192,), "8 × 1024": (1024,) * 8, "1 × 1024": (1024,), "64 × 128": (128,) * 64}
DECODE_LAUNCHES = [
    *(DecodeLaunch(1, warps) for warps in (4, 8, 16)), DecodeLaunch(1, 8, 128), DecodeLaunch(2, 4),
    DecodeLaunch(2, 4, 128), DecodeLaunch(2, 8), DecodeLaunch(4, 2), DecodeLaunch(4, 4), DecodeLaunch(4, 8),
    DecodeLaunch(8, 2), DecodeLaunch(8, 4),
    DecodeLaunch(2, 4, 96), DecodeLaunch(2, 4, 112), DecodeLaunch(4, 2, 96), DecodeLaunch(4, 4, 64),
]  # fmt: skip
SWEEPS: dict[str, list[ChunkLaunch]] = {
    "convolve": [
        LAUNCH._replace(convolve_warps=warps, convolve_tokens=tokens, convolve_channels=channels)
        for warps, tokens, channels in ((4, 16, 512), (4, 32, 512), (4, 64, 512), (2, 16, 256), (2, 32, 256),
                                        (8, 32, 1024))
    ],
    "solve": [LAUNCH._replace(solve_warps=warps) for warps in (2, 4, 8)],
    "pass": [
        LAUNCH._replace(values=values, pass_warps=warps, pass_stages=stages)
        for values, warps, stages in ((32, 2, 3), (32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 2),
                                      (64, 8, 3), (128, 8, 2))
    ],
}  # fmt: skip
STRIPS = (512, 1024, 2048, 4096, 8192)
L2_BYTES = 50 * 2**20


def checks() -> Checks:
    first, second = LAYERS.values()
    return [
        ("delta decode 16/32 heads, each launch", partial(decodes, first, DECODE_LAUNCHES)),
        ("delta decode 16/48 heads", partial(decodes, second, [])),
        ("delta decode float32", partial(decodes, first, [], F32)),
        *((f"delta drafts {dtype}", partial(verifies, first, dtype)) for dtype in (BF16, F32)),
        ("delta decode in a graph of dependent launches", in_a_graph),
        *(
            (f"delta prompts 16/32 heads, {about}", partial(prefills, first, *given))
            for about, given in PROMPTS.items()
        ),
        ("delta prompts 16/48 heads, mixed", partial(prefills, second, *PROMPTS["mixed"])),
        ("delta prompts float32, mixed", partial(prefills, first, *PROMPTS["mixed"], F32)),
        *(
            (
                f"delta prompts, heads of {k} and {v} dims",
                partial(prefills, DeltaShape(2, 4, k, v, 4), (200, 64), (0, 3)),
            )
            for k, v in SMALL_HEADS
        ),
        ("delta prompts alone and in strips", alone),
        ("delta prompts by each launch", each_launch),
        ("delta snapshots", snapshots),
    ]


# -- a layer -------------------------------------------------------------------------------------------------------

State = tuple[torch.Tensor, torch.Tensor]  # tail [channels, width - 1], matrices [heads, key dim, value dim]


@dataclass
class Layer:
    """Weights drawn anew, and an arena of random pages. Heads forget within a token or remember thousands."""

    shape: DeltaShape
    pages: int
    dtype: torch.dtype = BF16
    queue: list[int] = field(init=False)

    def __post_init__(self) -> None:
        key_heads, heads, key_dim, value_dim, width = self.shape
        self.widths = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
        self.channels, self.values = sum(self.widths), heads * value_dim
        self.conv = torch.randn(self.channels, width, device=CUDA) / 2
        self.decay = torch.exp(torch.rand(heads, device=CUDA) * 9 - 6.5)
        self.dt_bias, self.norm = torch.randn(heads, device=CUDA), torch.rand(value_dim, device=CUDA) + 0.5
        counts = [key_heads, key_heads, heads, heads]
        dims = [key_dim * (width - 1), key_dim * (width - 1), value_dim * (width - 1), key_dim * value_dim]
        sizes = [self.dtype.itemsize] * 3 + [4]
        starts = list(accumulate((n * d * s for n, d, s in zip(counts, dims, sizes, strict=True)), initial=0))
        self.page_units = -(-starts[-1] // OFFSET_UNIT_BYTES)
        self.page_bytes = self.page_units * OFFSET_UNIT_BYTES
        self.arena = torch.zeros(self.pages * self.page_bytes, dtype=torch.uint8, device=CUDA)
        views = [self.arena.view(self.dtype)] * 3 + [self.arena.view(F32)]
        self.parts = [
            StatePart(view, start // size, OFFSET_UNIT_BYTES // size, count, dim)
            for view, start, size, count, dim in zip(views, starts, sizes, counts, dims, strict=False)
        ]
        self.matrix_at = starts[3]
        self.renew()

    def renew(self) -> None:
        pages = self.arena.view(self.pages, self.page_bytes)
        for page in pages:
            page[: self.matrix_at].view(self.dtype).normal_()
            page[self.matrix_at :].view(F32).normal_().mul_(0.1)
        self.queue = torch.randperm(self.pages).tolist()

    def take(self, count: int) -> torch.Tensor:
        """Offsets of pages that nobody has."""
        return ints(*(self.queue.pop() * self.page_units for _ in range(count)))

    def made(self, rows: int) -> torch.Tensor:
        width = self.channels + self.values + 2 * self.shape.value_heads
        return torch.randn(rows, width, device=CUDA).to(self.dtype)

    def state(self, offset: int) -> State:
        page = self.arena[offset * OFFSET_UNIT_BYTES :][: self.page_bytes]
        tail = page[: self.matrix_at].view(self.dtype).view(self.channels, -1).double()
        matrices = page[self.matrix_at :].view(F32)[: self.shape.value_heads * self.parts[3].elements]
        return tail, matrices.view(-1, self.shape.key_dim, self.shape.value_dim).double()

    @property
    def weights(self) -> tuple[Any, ...]:
        return self.parts[:3], self.parts[3], self.conv, self.decay, self.dt_bias, self.norm

    @property
    def options(self) -> dict[str, Any]:
        return {"key_heads": self.shape.key_heads, "eps": EPS}

    def exact(self, made: torch.Tensor, offset: int, start: int) -> tuple[torch.Tensor, State]:
        """Outputs of one sequence's rows and the state behind them, in float64, token by token."""
        tail, state = self.state(offset)
        if start == 0:
            tail, state = torch.zeros_like(tail), torch.zeros_like(state)
        key_heads, heads, key_dim, value_dim, width = self.shape
        qkv, z, b, a = made.double().split([self.channels, self.values, heads, heads], dim=-1)
        inputs = torch.cat([tail.t(), qkv])
        mixed = F.silu(sum(inputs[t : t + len(made)] * self.conv[:, t].double() for t in range(width)))
        q, k, v = mixed.split(self.widths, dim=-1)
        q, k = (unit(x.view(-1, key_heads, key_dim)).repeat_interleave(heads // key_heads, 1) for x in (q, k))
        q, v = q * key_dim**-0.5, v.view(-1, heads, value_dim)
        decays, rates = (-self.decay.double() * F.softplus(a + self.dt_bias.double())).exp(), b.sigmoid()
        reads = torch.empty_like(v)
        for t in range(len(made)):
            state = state * decays[t, :, None, None]
            learned = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * rates[t, :, None]
            state = torch.baddbmm(state, k[t, :, :, None], learned[:, None, :])
            reads[t] = torch.einsum("hkv,hk->hv", state, q[t])
        normed = F.rms_norm(reads, (value_dim,), self.norm.double(), EPS)
        return normed.flatten(1) * F.silu(z), (inputs[len(made) :].t(), state)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=CUDA)


def nans(rows: int, layer: Layer) -> torch.Tensor:
    return torch.full((rows, layer.values), math.nan, dtype=layer.dtype, device=CUDA)


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


# -- checks --------------------------------------------------------------------------------------------------------


def compare(layer: Layer, what: str, cases: list[tuple[torch.Tensor, tuple[torch.Tensor, State], int]]) -> list[float]:
    """Worst errors of outputs and matrices; tails are copies. A case: what came out, what should have, the page."""
    worst = [0.0, 0.0]
    for found, (want, (tail, matrices)), page in cases:
        now = layer.state(page)
        assert torch.equal(now[0], tail), f"{what}: the convolution's tail is wrong"
        errors = relative(found, want), relative(now[1], matrices)
        assert all(not math.isnan(error) for error in errors), f"{what}: NaN"
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    allowed = ALLOWED[what.split()[0], layer.dtype]
    assert worst[0] <= allowed[0] and worst[1] <= allowed[1], f"{what}: errors {worst[0]:.1e} {worst[1]:.1e}"
    return worst


def decodes(shape: DeltaShape, launches: list[DecodeLaunch], dtype: torch.dtype = BF16) -> str:
    """Rows that go on, begin and are padding, by the planned launch; eight rows by each of `launches`."""
    layer, worst = Layer(shape, 2 * max(ROWS) + 8, dtype), [0.0, 0.0]
    forms: list[tuple[int, DecodeLaunch | None]] = [(rows, None) for rows in ROWS]
    forms += [(8, launch) for launch in launches]
    for rows, launch in forms:
        layer.renew()
        starts = [5] if rows == 1 else [(7, 0, -1, 1, 30000)[row % 5] for row in range(rows)]
        made, places = layer.made(rows), StatePlaces(layer.take(rows), layer.take(rows), ints(*starts))
        out, arena = nans(rows, layer), layer.arena.view(layer.pages, -1).clone()
        decode_delta(made, places, *layer.weights, out, **layer.options, launch=launch)
        real = [row for row, start in enumerate(starts) if start >= 0]
        before, after = places.before.tolist(), places.after.tolist()
        cases = [
            (out[row], (want[0], state), after[row])
            for row in real[:12] + real[-4:]
            for want, state in [layer.exact(made[row : row + 1], before[row], starts[row])]
        ]
        errors = compare(layer, f"decode {rows} rows, {launch or 'planned'}", cases)
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
        written = {after[row] // layer.page_units for row in real}
        others = [page for page in range(layer.pages) if page not in written]
        assert torch.equal(layer.arena.view(layer.pages, -1)[others], arena[others]), f"{rows} rows: a page changed"
    return f"{worst[0]:.1e}, states {worst[1]:.1e}"


def drafted(lengths: tuple[int, ...], start: int) -> torch.Tensor:
    """A table of sequences that have so many rows in one step."""
    rows = accumulate(lengths, initial=0)
    table = [Segment(0, start, start + own, row, row, own) for row, own in zip(rows, lengths, strict=False)]
    return torch.tensor(table, dtype=torch.int32, device=CUDA)


def verifies(shape: DeltaShape, dtype: torch.dtype) -> str:
    """Sequences of several rows: each row and each state as by steps of one row, which other checks compare."""
    worst = 0.0
    for lengths in ((5,), (1, 5, 2, 9) * 4):
        count, launches = len(lengths), [None, *DECODE_LAUNCHES]
        layer = Layer(shape, 3 * count + 4, dtype)
        made, places = layer.made(sum(lengths)), [layer.take(count) for _ in range(3)]
        segments, begun = drafted(lengths, 7), ints(*[7] * count)
        apart, firsts = nans(len(made), layer), segments[:, 3].tolist()
        final: list[State] = []
        for sequence, (first, own) in enumerate(zip(firsts, lengths, strict=True)):
            pages = [page[sequence : sequence + 1] for page in places]
            for at in range(own):  # the first page is read again by each launch
                read, written = pages[0] if at == 0 else pages[1 + (at + 1) % 2], pages[1 + at % 2]
                row = slice(first + at, first + at + 1)
                one = StatePlaces(read, written, begun[:1] + at)
                decode_delta(made[row], one, *layer.weights, apart[row], **layer.options)
            final.append(layer.state(int(pages[1 + (own - 1) % 2])))
        for launch in launches:
            out = nans(len(made), layer)
            with suppress(OutOfResources):
                decode_delta(made, StatePlaces(places[0], places[1], begun), *layer.weights, out, **layer.options,
                             launch=launch, segments=segments)  # fmt: skip
                for sequence, (tail, matrices) in enumerate(final):
                    found = layer.state(int(places[1][sequence]))
                    assert torch.equal(found[0], tail), f"{lengths}, {launch}: a tail is wrong"
                    worst = max(worst, relative(found[1], matrices))
                worst = max(worst, relative(out, apart.double()))
                assert worst < ALLOWED["decode", dtype][0], f"{lengths}, {launch}: {worst:.1e} from steps of one row"
    return f"{worst:.1e} from steps of one row"


def in_a_graph() -> str:
    """Steps by PDL behind a projection, replayed, against the same launches in order."""
    layer = Layer(LAYERS["Qwen3.5-35B-A3B"], 80)
    weight = (torch.randn(layer.made(1).shape[1], layer.values, device=CUDA) / layer.values**0.5).to(BF16)
    start = layer.arena.clone()
    for rows, launch in ((2, None), (2, DecodeLaunch(4, 4)), (33, None)):
        layer.renew()
        pages, first = [layer.take(rows) for _ in range(2)], torch.randn(rows, layer.values, device=CUDA).to(BF16)
        x = first.clone()

        starts = [ints(*([turn] * rows)) for turn in range(6)]

        def steps(pdl: bool, launch=launch, pages=pages, x=x, starts=starts) -> None:
            for turn in range(6):
                places = StatePlaces(pages[turn % 2], pages[1 - turn % 2], starts[turn])
                y = torch.empty_like(x)
                decode_delta(x @ weight.t(), places, *layer.weights, y, **layer.options, launch=launch, pdl=pdl)
                if not pdl:
                    torch.cuda.synchronize()
                x.copy_(y)

        steps(pdl=False)
        want, states = x.clone(), layer.arena.clone()
        x.copy_(first)
        steps(pdl=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            steps(pdl=True)
        for turn in range(20):
            x.copy_(first)
            layer.arena.random_(0, 64) if turn == 0 else layer.arena.copy_(start)
            graph.replay()
            assert torch.equal(x, want), f"{rows} rows, turn {turn}: differs from launches in order"
        kept = torch.cat(pages).long() // layer.page_units
        now, then = (arena.view(layer.pages, -1)[kept] for arena in (layer.arena, states))
        matrices = slice(layer.matrix_at, layer.matrix_at + 4 * layer.parts[3].heads * layer.parts[3].elements)
        assert torch.equal(now[:, matrices], then[:, matrices]), "states differ"
    return ""


@dataclass
class Prompts:
    """Segments behind three rows of others."""

    layer: Layer
    lengths: tuple[int, ...]
    starts: tuple[int, ...]

    def __post_init__(self) -> None:
        rows = list(accumulate(self.lengths, initial=3))
        self.segments = [
            Segment(slot, start, start + length, row, row, length)
            for slot, (length, start, row) in enumerate(zip(self.lengths, self.starts, rows, strict=False))
        ]
        self.made = self.layer.made(rows[-1])
        self.before, self.after = (self.layer.take(len(self.lengths)) for _ in range(2))

    def run(
        self, strip_tokens: int = STRIP_TOKENS, launch: ChunkLaunch | None = None, chosen: list[int] | None = None,
        saved: torch.Tensor | None = None, pdl: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        out = nans(len(self.made), self.layer)
        self.step(out, strip_tokens, launch, chosen, saved, pdl=pdl)()
        return out

    def step(
        self, out: torch.Tensor, strip_tokens: int = STRIP_TOKENS, launch: ChunkLaunch | None = None,
        chosen: list[int] | None = None, saved: torch.Tensor | None = None, *, pdl: bool = True,
    ) -> Callable[[], None]:  # fmt: skip
        layer, chosen = self.layer, list(range(len(self.segments))) if chosen is None else chosen
        segments, others = tuple(self.segments[i] for i in chosen), ints(0, 0, 0)
        places = StatePlaces(
            torch.cat([others, self.before[chosen]]), torch.cat([others, self.after[chosen]]),
            torch.cat([others - 1, ints(*(s.start for s in segments))]),
        )  # fmt: skip
        bytes_needed = delta_workspace_bytes(layer.shape, layer.dtype, strip_tokens)
        workspace = torch.full((bytes_needed,), 255, dtype=torch.uint8, device=CUDA)
        queries = ChunkQueries(torch.tensor(segments, dtype=torch.int32, device=CUDA), segments, {})
        return lambda: chunk_delta(
            self.made,
            places,
            queries,
            *layer.weights,
            out,
            workspace,
            **layer.options,
            snapshots=saved,
            launch=launch,
            pdl=pdl,
        )

    def exact(self) -> list[tuple[torch.Tensor, State]]:
        return [
            self.layer.exact(self.made[s.rows], int(page), s.start)
            for s, page in zip(self.segments, self.before, strict=True)
        ]


def prefills(shape: DeltaShape, lengths: tuple[int, ...], starts: tuple[int, ...], dtype: torch.dtype = BF16) -> str:
    prompts = Prompts(Layer(shape, 2 * len(lengths) + 4, dtype), lengths, starts)
    wants = prompts.exact()
    worst = [0.0, 0.0]
    for pdl in (False, True):
        out = prompts.run(pdl=pdl)
        torch.cuda.synchronize()
        assert out[:3].isnan().all(), "rows of others were written"
        cases = [
            (out[s.rows], want, int(page)) for s, want, page in zip(prompts.segments, wants, prompts.after, strict=True)
        ]
        worst = compare(prompts.layer, f"chunks pdl {pdl}", cases)
    return f"{worst[0]:.1e}, states {worst[1]:.1e}"


def alone() -> str:
    """A segment's bits depend neither on other segments nor on strips, and two runs agree."""
    lengths, starts = PROMPTS["mixed"]
    prompts = Prompts(Layer(LAYERS["Qwen3.5-35B-A3B"], 20), lengths, starts)
    together = prompts.run()
    pages = [prompts.layer.state(int(page)) for page in prompts.after]
    everyone = list(range(len(lengths)))
    for about, chosen, strip, pdl in (("again", everyone, STRIP_TOKENS, False), ("strips", everyone, 640, True),
                                      ("alone", [4], STRIP_TOKENS, False), ("alone", [6], 256, True)):  # fmt: skip
        found = prompts.run(strip, chosen=chosen, pdl=pdl)
        for i in chosen:
            rows, now = prompts.segments[i].rows, prompts.layer.state(int(prompts.after[i]))
            assert torch.equal(found[rows], together[rows]), f"{about}: segment {i} differs"
            assert torch.equal(now[0], pages[i][0]) and torch.equal(now[1], pages[i][1]), f"{about}: state {i} differs"
    return ""


def each_launch() -> str:
    prompts = Prompts(Layer(LAYERS["Qwen3.5-35B-A3B"], 8), (700, 130), (0, 77))
    wants, worst, tried = prompts.exact(), [0.0, 0.0], 0
    for launch in [launch for launches in SWEEPS.values() for launch in launches]:
        with suppress(OutOfResources):
            out = prompts.run(launch=launch)
            cases = [
                (out[s.rows], want, int(page))
                for s, want, page in zip(prompts.segments, wants, prompts.after, strict=True)
            ]
            worst = [max(pair) for pair in zip(worst, compare(prompts.layer, f"chunks {launch}", cases), strict=True)]
            tried += 1
    return f"{tried} launches: {worst[0]:.1e}, states {worst[1]:.1e}"


def snapshots() -> str:
    """States in front of positions within segments, and at their ends."""
    prompts = Prompts(Layer(LAYERS["Qwen3.5-35B-A3B"], 16), (500, 3, 1), (10, 0, 4))
    layer, plain = prompts.layer, prompts.run()
    wanted = [(0, 11), (0, 74), (0, 333), (0, 510), (1, 2)]
    pages = layer.take(len(wanted)).tolist()
    positions = [[position for i, position in wanted if i == segment] for segment in range(3)]
    out = prompts.run(saved=one_table(positions, pages))
    assert torch.equal(out[3:], plain[3:]), "snapshots change what comes out"
    cases = []
    for (index, position), page in zip(wanted, pages, strict=True):
        segment = prompts.segments[index]
        rows = prompts.made[segment.row : segment.row + position - segment.start]
        want, state = layer.exact(rows, int(prompts.before[index]), segment.start)
        cases.append((out[segment.row : segment.row + len(rows)], (want, state), page))
    worst = compare(layer, "chunks snapshots", cases)
    return f"states {worst[1]:.1e}"


def one_table(positions: list[list[int]], pages: list[int]) -> torch.Tensor:
    """Of pages in one stripe."""
    return ints(*snapshot_tables(positions, np.array([pages], dtype=np.int32))[0].tolist())


# -- timings -------------------------------------------------------------------------------------------------------


def timings() -> None:
    fla = find_fla()
    print(f"\n{'delta, one token':18} {'rows':>5} {'µs':>8} {'GB/s':>6} {'of roof':>7} {'fla µs':>8}  launch")
    for name, shape in LAYERS.items():
        for rows in ROWS:
            steps = Decoding(shape, rows)
            took = microseconds(steps.step(None), repeat=steps.sets)
            beside = by_fla(partial(fla_decode, fla, shape, rows), fla)
            speed = steps.bytes_moved / took / 1e3
            launch = plan_decode(rows, shape)
            print(
                f"{name:18} {rows:5} {took:8.1f} {speed:6.0f} {speed / ROOF_TB / 1e3:7.0%} {beside:8}  "
                f"split {launch.split}, {launch.warps} warps",
                flush=True,
            )
            del steps
    print(f"\n{'delta, prompts':18} {'tokens':>9} {'µs':>8} {'TFLOP/s':>7} {'fla µs':>8} {'leaving':>8}  launches, µs")
    for name, shape in LAYERS.items():
        for about, lengths in TIMED_PROMPTS.items():
            prompts = Prompts(Layer(shape, 3 * len(lengths)), lengths, (0,) * len(lengths))
            step = prompts.step(nans(len(prompts.made), prompts.layer))
            took = microseconds(step)
            # One in the middle of each prompt.
            pages = prompts.layer.take(len(lengths)).tolist()
            saved = one_table([[length // 2] for length in lengths], pages)
            leaving = microseconds(prompts.step(nans(len(prompts.made), prompts.layer), saved=saved))
            beside = by_fla(partial(fla_chunks, fla, shape, lengths), fla)
            speed = operations(shape, sum(lengths)) / took / 1e6
            parts = ", ".join(f"{kernel} {spent:.0f}" for kernel, spent in by_kernel(step))
            print(f"{name:18} {about:>9} {took:8.1f} {speed:7.1f} {beside:8} {leaving:8.1f}  {parts}", flush=True)
            del prompts, step


def operations(shape: DeltaShape, tokens: int, chunk: int = 64) -> int:
    """Of the products: five within a chunk, three with the state."""
    key, value = shape.key_dim, shape.value_dim
    within = chunk * (3 * key + 2 * value)
    return 2 * tokens * shape.value_heads * (within + 3 * key * value)


def by_kernel(step: Callable[[], None]) -> Iterator[tuple[str, float]]:
    """Microseconds of each kernel in one step, all its launches together."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    for name, spent in exclusive_times(profile).items():
        yield name.removesuffix("_kernel"), sum(spent) / 3


class Decoding:
    """Rows that go from one set of pages to another and back; the sets taken in turn exceed the L2 cache."""

    def __init__(self, shape: DeltaShape, rows: int, each: int = 1) -> None:
        page_bytes = 4 * shape.value_heads * shape.key_dim * shape.value_dim
        self.sets = max(2, min(32, 2 * L2_BYTES // (2 * rows * page_bytes) + 1))
        self.layer = Layer(shape, 2 * rows * self.sets)
        starts = ints(*[100] * rows)
        self.places = [StatePlaces(self.layer.take(rows), self.layer.take(rows), starts) for _ in range(self.sets)]
        self.made, self.out = self.layer.made(rows * each), nans(rows * each, self.layer)
        self.segments = drafted((each,) * rows, 100) if each > 1 else None
        per_row = 2 * self.layer.page_bytes + 2 * (self.made.shape[1] + self.layer.values)
        self.bytes_moved = rows * per_row + 4 * self.layer.conv.numel()

    def step(self, launch: DecodeLaunch | None) -> Callable[[], None]:
        turns = cycle(self.places)
        return lambda: decode_delta(
            self.made, next(turns), *self.layer.weights, self.out, **self.layer.options, launch=launch, pdl=True,
            segments=self.segments,
        )  # fmt: skip


def sweep(names: list[str]) -> None:
    """Microseconds, best first; * marks what is planned."""
    for name, shape in LAYERS.items():
        for rows in (1, 2, 4, *ROWS[1:]) if not names or "decode" in names else ():
            ranked_decoding(f"{name} decode {rows}", Decoding(shape, rows), plan_decode(rows, shape))
        for rows in (1, 8, 32) if not names or "drafts" in names else ():
            planned = plan_decode(rows * DRAFTED_ROWS, shape, several=True)
            ranked_decoding(f"{name} {DRAFTED_ROWS} rows of {rows}", Decoding(shape, rows, DRAFTED_ROWS), planned)
        for about, lengths in list(TIMED_PROMPTS.items())[:2]:
            prompts = Prompts(Layer(shape, 2 * len(lengths)), lengths, (0,) * len(lengths))
            out = nans(len(prompts.made), prompts.layer)
            for kind, launches in SWEEPS.items():
                if names and kind not in names:
                    continue
                found: dict[Any, float] = {}
                for launch in launches:
                    with suppress(OutOfResources):
                        found[launch] = microseconds(prompts.step(out, launch=launch), rounds=5)
                ranked(f"{name} {about} {kind}", found, LAUNCH)
            if not names or "strips" in names:
                ranked(f"{name} {about} strips", {tokens: microseconds(prompts.step(out, tokens), rounds=5)
                                                 for tokens in STRIPS}, STRIP_TOKENS)  # fmt: skip


def ranked_decoding(about: str, steps: Decoding, planned: DecodeLaunch) -> None:
    timed: dict[Any, float] = {}
    for launch in dict.fromkeys([planned, *DECODE_LAUNCHES]):
        with suppress(OutOfResources):
            timed[launch] = microseconds(steps.step(launch), repeat=steps.sets, rounds=5)
    ranked(about, timed, planned)


def ranked(about: str, found: dict[Any, float], planned: Any) -> None:
    def cell(launch: Any) -> str:
        told = "/".join(map(str, launch)) if isinstance(launch, tuple) else str(launch)
        return f"{told}{'*' if launch == planned else ''} {found[launch]:.1f}"

    order = sorted(found, key=found.__getitem__)
    shown = order[:6] + [launch for launch in order[6:] if launch == planned]
    print(f"{about}: {' | '.join(map(cell, shown))}", flush=True)


# -- fla-core ------------------------------------------------------------------------------------------------------


def find_fla() -> Any:
    sys.path.insert(0, ".fla")
    try:
        from fla.ops import gated_delta_rule
    except ImportError as error:
        print(f"fla-core is not timed: {error}")
        return None
    return gated_delta_rule


def by_fla(time: Callable[[], float], fla: Any) -> str:
    """Its microseconds, or why there are none."""
    if fla is None:
        return ""
    try:
        return f"{time():8.1f}"
    except Exception as error:
        return type(error).__name__


def fla_inputs(shape: DeltaShape, batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """What its kernels take: behind convolution, SiLU and gates, and in front of the gated norm."""
    key_heads, heads, key_dim, value_dim, _ = shape
    return {
        "q": torch.randn(batch, tokens, key_heads, key_dim, device=CUDA, dtype=BF16),
        "k": torch.randn(batch, tokens, key_heads, key_dim, device=CUDA, dtype=BF16),
        "v": torch.randn(batch, tokens, heads, value_dim, device=CUDA, dtype=BF16),
        "g": -torch.rand(batch, tokens, heads, device=CUDA),
        "beta": torch.rand(batch, tokens, heads, device=CUDA, dtype=BF16),
    }


def fla_decode(fla: Any, shape: DeltaShape, rows: int) -> float:
    """The delta rule of one token of each row: no convolution, no gated norm."""
    inputs = fla_inputs(shape, rows, 1)
    page_bytes = 4 * shape.value_heads * shape.key_dim * shape.value_dim
    count = max(2, min(32, 2 * L2_BYTES // (2 * rows * page_bytes) + 1))
    state = (rows, shape.value_heads, shape.key_dim, shape.value_dim)
    turns = cycle([torch.randn(state, device=CUDA) for _ in range(count)])

    @torch.no_grad()
    def step() -> None:
        fla.fused_recurrent_gated_delta_rule(
            **inputs, initial_state=next(turns), output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    return microseconds(step, repeat=count)


def fla_chunks(fla: Any, shape: DeltaShape, lengths: tuple[int, ...]) -> float:
    """The delta rule of prompts of one length: no convolution, no gated norm."""
    inputs = fla_inputs(shape, len(lengths), lengths[0])
    state = torch.randn(len(lengths), shape.value_heads, shape.key_dim, shape.value_dim, device=CUDA)

    @torch.no_grad()
    def step() -> None:
        fla.chunk_gated_delta_rule(**inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    return microseconds(step)


if __name__ == "__main__":
    words = sys.argv[1:]
    if not words:
        for about, check in checks():
            print(f"{about}: {check()}", flush=True)
    if not words or words[0] == "table":
        timings()
    elif words[0] == "sweep":
        sweep(words[1:])
