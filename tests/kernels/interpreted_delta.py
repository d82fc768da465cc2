"""Checks of Gated DeltaNet's kernels against the reference, for a process with TRITON_INTERPRET=1; its arguments name
them.
"""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from windowpane.attention.segments import ChunkQueries
from windowpane.kv.layout import OFFSET_UNIT_BYTES
from windowpane.lowering.gpu.kernels.delta import DecodeLaunch, DeltaShape, decode_delta
from windowpane.lowering.gpu.kernels.delta_chunks import chunk_delta, delta_workspace_bytes
from windowpane.lowering.gpu.kernels.state_places import StatePart, StatePlaces, snapshot_tables
from windowpane.lowering.reference.recurrence import causal_convolution, gated_delta_rule
from windowpane.schedule.step import Segment

EPS, WIDTH, PAGES = 1e-5, 4, 24
UNIT = OFFSET_UNIT_BYTES // 4
SHAPE = DeltaShape(1, 2, 16, 32, WIDTH)

Part = tuple[torch.Tensor, torch.Tensor]  # convolution tail [channels, width - 1], matrices [heads, key dim, value dim]


@dataclass
class Layer:
    """A layer of few, small heads with an arena of random pages."""

    shape: DeltaShape = SHAPE
    weight: torch.Tensor | None = field(default_factory=lambda: torch.rand(32) + 0.5)

    def __post_init__(self) -> None:
        key_heads, heads, key_dim, value_dim, _ = self.shape
        self.widths = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
        self.channels, self.values = sum(self.widths), heads * value_dim
        self.conv = torch.randn(self.channels, WIDTH) / 2
        self.decay, self.dt_bias = torch.rand(heads) * 4, torch.randn(heads)
        sizes = [width * (WIDTH - 1) for width in self.widths] + [heads * key_dim * value_dim]
        self.page_units = -(-sum(sizes) // UNIT) + 1
        self.arena = torch.randn(PAGES * self.page_units * UNIT)
        firsts = [0, *accumulate(sizes)]
        parts = [key_heads, key_heads, heads, heads]
        self.parts = [
            StatePart(self.arena, first, UNIT, count, size // count)
            for first, size, count in zip(firsts, sizes, parts, strict=False)
        ]
        self.queue = torch.randperm(PAGES).tolist()

    def pages(self, count: int) -> torch.Tensor:
        """Offsets of pages that nobody has."""
        return torch.tensor([self.queue.pop() * self.page_units for _ in range(count)], dtype=torch.int32)

    def made(self, rows: int) -> torch.Tensor:
        width = self.channels + self.values + 2 * self.shape.value_heads
        return torch.randn(rows, width + 8)[:, :width]

    def stored(self, page: int) -> Part:
        flat = [
            self.arena[page * UNIT + p.first : page * UNIT + p.first + p.heads * p.elements].clone() for p in self.parts
        ]
        tail = torch.cat([part.view(-1, WIDTH - 1) for part in flat[:3]])
        return tail, flat[3].view(self.shape.value_heads, self.shape.key_dim, self.shape.value_dim)

    def plain(self, made: torch.Tensor, before: Part) -> tuple[torch.Tensor, Part]:
        """Outputs of one sequence's rows, and its state behind them."""
        key_heads, heads, key_dim, value_dim, _ = self.shape
        qkv, z, b, a = made[None].split([self.channels, self.values, heads, heads], dim=-1)
        mixed, tail = causal_convolution(qkv, before[0][None], self.conv, None)
        q, k, v = (
            part.unflatten(-1, (-1, dim))
            for part, dim in zip(F.silu(mixed).split(self.widths, dim=-1), (key_dim, key_dim, value_dim), strict=True)
        )
        q, k = (part.repeat_interleave(heads // key_heads, dim=2) for part in (q, k))
        log_decays = -self.decay * F.softplus(a + self.dt_bias)
        read, state = gated_delta_rule(q, k, v, log_decays, b.sigmoid(), before[1][None])
        normed = F.rms_norm(read, (value_dim,), self.weight, EPS)
        return (normed.flatten(2) * F.silu(z))[0], (tail[0], state[0])

    @property
    def weights(self) -> tuple:
        return self.parts[:3], self.parts[3], self.conv, self.decay, self.dt_bias, self.weight

    @property
    def options(self) -> dict:
        return {"key_heads": self.shape.key_heads, "eps": EPS}

    def expected(self, made: torch.Tensor, page: int, start: int) -> tuple[torch.Tensor, Part]:
        before = self.stored(page)
        return self.plain(made, before if start else (torch.zeros_like(before[0]), torch.zeros_like(before[1])))


def close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=3e-5, atol=3e-5 * float(want.abs().max()))


def same_state(found: Part, want: Part) -> None:
    assert torch.equal(found[0], want[0])
    close(found[1], want[1])


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# -- decoding ------------------------------------------------------------------------------------------------------


def decoding() -> None:
    """Begun, new and padding rows, with a head's values in one program or several, and with one value head a key."""
    for shape, launch, weighted in (
        (SHAPE, None, True),
        (DeltaShape(2, 4, 32, 16, WIDTH), DecodeLaunch(1, 4), False),
        (DeltaShape(1, 1, 16, 64, WIDTH), DecodeLaunch(4, 4), True),
    ):
        layer = Layer(shape, torch.rand(shape.value_dim) + 0.5 if weighted else None)
        rows, starts = 4, ints(7, 0, -1, 1)
        made, before, after = layer.made(rows + 2), layer.pages(rows), layer.pages(rows)
        out, arena = torch.full((rows, layer.values), math.nan), layer.arena.clone()
        wants = [layer.expected(made[row : row + 1], int(before[row]), int(starts[row])) for row in range(rows)]
        decode_delta(made, StatePlaces(before, after, starts), *layer.weights, out, **layer.options, launch=launch)
        for row in (0, 1, 3):
            close(out[row], wants[row][0][0])
            same_state(layer.stored(int(after[row])), wants[row][1])
            written = slice(int(after[row]) * UNIT, (int(after[row]) + layer.page_units) * UNIT)
            arena[written] = layer.arena[written]
        assert torch.equal(out[2], torch.zeros(layer.values))
        assert torch.equal(arena, layer.arena), "a page of nobody was written"


def several() -> None:
    """Rows of a sequence in one step: bits are those of as many steps of one row each, with two pages in turn."""
    lengths, starts = (5, 1, 2), (7, 0, 1)
    count, rows, last = len(lengths), [0, *accumulate(lengths)], sum(lengths)
    table = [Segment(0, start, start + n, row, row, n) for start, n, row in zip(starts, lengths, rows, strict=False)]
    table += [Segment(0, -1, -1, last, last, 1), Segment(0, -1, -1, 0, 0, 0)]  # a padding row, and nobody
    for launch in (DecodeLaunch(1, 4), DecodeLaunch(2, 4)):
        layer = Layer()
        made, before, after = layer.made(last + 1), layer.pages(count), layer.pages(count)
        places = StatePlaces(*(torch.cat([pages, ints(0, 0)]) for pages in (before, after)), ints(*starts, -1, -1))
        arena, together = layer.arena.clone(), torch.full((last + 1, layer.values), math.nan)
        options = {**layer.options, "launch": launch}
        decode_delta(made, places, *layer.weights, together, **options, segments=torch.tensor(table, dtype=torch.int32))
        states = [layer.stored(page) for page in after.tolist()]
        for page in after.tolist():
            written = slice(page * UNIT, (page + layer.page_units) * UNIT)
            layer.arena[written] = arena[written]
        assert torch.equal(layer.arena, arena), "a page of nobody was written"
        apart = torch.zeros_like(together)
        for start, row, n, pages, state in zip(
            starts, rows, lengths, torch.stack([before, after], 1), states, strict=False
        ):
            for at in range(n):
                read, written = (pages[(at + side) % 2].reshape(1) for side in range(2))
                x, out = made[row + at : row + at + 1], apart[row + at : row + at + 1]
                decode_delta(x, StatePlaces(read, written, ints(start + at)), *layer.weights, out, **options)
            for found, want in zip(layer.stored(int(written)), state, strict=True):
                assert torch.equal(found, want)
        assert torch.equal(together, apart)


# -- segments ------------------------------------------------------------------------------------------------------


@dataclass
class Prompts:
    """Segments of these lengths behind `decoding` rows of others."""

    layer: Layer
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    decoding: int = 2

    def __post_init__(self) -> None:
        ends = list(accumulate(self.lengths, initial=self.decoding))
        self.segments = [
            Segment(slot, start, start + length, row, row, length)
            for slot, (start, length, row) in enumerate(zip(self.starts, self.lengths, ends, strict=False))
        ]
        self.made = self.layer.made(ends[-1])
        count = len(self.lengths)
        others = ints(*[-1] * self.decoding)
        self.before, self.after = (torch.cat([others, self.layer.pages(count)]) for _ in range(2))

    def run(self, chunks: int = 64, chosen: list[int] | None = None, snapshots: torch.Tensor | None = None):
        """Outputs of all rows, of these segments only where some are chosen."""
        chosen = list(range(len(self.segments))) if chosen is None else chosen
        segments = tuple(self.segments[i] for i in chosen)
        at = torch.tensor([*range(self.decoding), *(self.decoding + i for i in chosen)])
        places = StatePlaces(
            self.before[at], self.after[at], torch.cat([ints(*[5] * self.decoding), ints(*(s.start for s in segments))])
        )
        out = torch.full((len(self.made), self.layer.values), math.nan)
        workspace = torch.full(
            (delta_workspace_bytes(self.layer.shape, torch.float32, 64 * chunks),), 255, dtype=torch.uint8
        )
        queries = ChunkQueries(torch.tensor(segments, dtype=torch.int32), segments, {})
        chunk_delta(self.made, places, queries, *self.layer.weights, out, workspace, **self.layer.options,
                    snapshots=snapshots)  # fmt: skip
        return out


def segments() -> None:
    """Odd lengths, shorter than the convolution and longer than a chunk, new and begun; other rows are left alone."""
    prompts = Prompts(Layer(), (1, 2, 70), (0, 9, 33))
    wants = [
        prompts.layer.expected(prompts.made[s.rows], int(page), s.start)
        for s, page in zip(prompts.segments, prompts.before[2:], strict=True)
    ]
    out = prompts.run()
    assert out[:2].isnan().all()
    for segment, page, (want, state) in zip(prompts.segments, prompts.after[2:], wants, strict=True):
        close(out[segment.rows], want)
        same_state(prompts.layer.stored(int(page)), state)


def strips() -> None:
    """Bits do not depend on the strips that a workspace allows, nor on other segments."""
    prompts = Prompts(Layer(DeltaShape(1, 1, 16, 16, WIDTH), None), (130, 5, 64), (0, 3, 70))
    out = prompts.run()
    pages = [prompts.layer.stored(int(page)) for page in prompts.after[2:]]

    def same(found: torch.Tensor, chosen: list[int]) -> None:
        for i in chosen:
            rows = prompts.segments[i].rows
            assert torch.equal(found[rows], out[rows])
            now = prompts.layer.stored(int(prompts.after[2 + i]))
            assert torch.equal(now[0], pages[i][0]) and torch.equal(now[1], pages[i][1])

    same(prompts.run(chunks=2), [0, 1, 2])
    same(prompts.run(chosen=[2]), [2])


def correlated() -> None:
    """Keys that are nearly alike and are learned at once: the system's inverse must not lose its digits."""
    prompts = Prompts(Layer(), (64,), (40,))
    layer = prompts.layer
    keys = slice(layer.widths[0], 2 * layer.widths[0])
    prompts.made[:, keys] = prompts.made[:1, keys] + 0.01 * prompts.made[:, keys]
    prompts.made[:, layer.channels + layer.values :] = 6.0
    layer.decay *= 1e-3
    want, state = layer.expected(prompts.made[prompts.segments[0].rows], int(prompts.before[2]), 40)
    close(prompts.run()[prompts.segments[0].rows], want)
    same_state(layer.stored(int(prompts.after[2])), state)


def snapshots() -> None:
    """States in front of positions anywhere in a segment, its end included, without cutting it."""
    prompts = Prompts(Layer(DeltaShape(1, 1, 16, 32, WIDTH)), (70, 3, 1), (10, 0, 4))
    layer, plain = prompts.layer, prompts.run()
    wanted = [(0, 11), (0, 57), (0, 74), (0, 80), (1, 2)]
    pages = layer.pages(len(wanted)).tolist()
    positions = [[position for i, position in wanted if i == segment] for segment in range(3)]
    (table,) = snapshot_tables(positions, np.array([pages], dtype=np.int32))
    out = prompts.run(snapshots=torch.from_numpy(table))
    assert torch.equal(out[2:], plain[2:])
    for (index, position), page in zip(wanted, pages, strict=True):
        segment, before = prompts.segments[index], int(prompts.before[prompts.decoding + index])
        rows = prompts.made[segment.row : segment.row + position - segment.start]
        same_state(layer.stored(page), layer.expected(rows, before, segment.start)[1])


if __name__ == "__main__":
    warnings.filterwarnings("error")
    # the interpreter's own use of NumPy
    warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
    torch.manual_seed(0)
    for check in sys.argv[1:]:
        globals()[check]()
