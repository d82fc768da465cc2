"""A step's segments as prefill kernels know them, and how a layer cuts their queries into tiles."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from windowpane.kv.hopper_scratch import LAUNCH_SEGMENTS, TILE_TOKENS, WIDE_DIM
from windowpane.schedule.step import Segment

STOP, QUERIES = (Segment._fields.index(name) for name in ("stop", "q_count"))

Table = NDArray[np.int32]  # of segments [n, 6]


class Launch(NamedTuple):
    """Segments that share a launch: `members` [n, 2] are which, and the first of their rows among rotated keys; `tiles`
    [programs, 2] are which of them and which tile of its queries. The longest has `longest` tokens.
    """

    members: Any
    tiles: Any
    longest: int


@dataclass(frozen=True, slots=True)
class Large:
    """Which segments go to a kernel that wants many queries, and how they share its launches.

    A program has `tokens` queries of one segment, and `side_by_side` of them their heads. Segments of two such tiles
    or more go there unless they have fewer than `least_programs` together. A launch has LAUNCH_SEGMENTS at most, and,
    where keys are rotated ahead, `rotated_rows` positions of them. Smaller segments join where a launch has room: the
    end of a long prompt has few programs, each of which sees all of it, and by themselves they leave a device idle.
    """

    tokens: int
    side_by_side: int
    least_programs: int
    rotated_rows: int | None = None

    def takes(self, segments: Table) -> NDArray[np.bool_]:
        queries = segments[:, QUERIES]
        taken = queries >= 2 * self.tokens
        programs = int((-(-queries[taken] // self.tokens)).sum()) * self.side_by_side
        if programs < self.least_programs:
            return np.zeros_like(taken)
        rows = _rotated_rows(segments[:, STOP])
        room = -int(taken.sum()) % LAUNCH_SEGMENTS
        left = np.inf if self.rotated_rows is None else self.rotated_rows - int(rows[taken].sum())
        others = np.flatnonzero(~taken & (queries > 0))
        # Those that see most first.
        for index in others[np.argsort(-rows[others], kind="stable")].tolist():
            if room and rows[index] <= left:
                taken[index] = True
                room, left = room - 1, left - rows[index]
        return taken

    def launches(self, segments: Table) -> list[Launch]:
        found: list[list[tuple[int, int]]] = []
        rows = 0
        for index in np.flatnonzero(self.takes(segments)).tolist():
            own = int(_rotated_rows(segments[index, STOP]))
            is_full = not found or len(found[-1]) == LAUNCH_SEGMENTS
            if is_full or (self.rotated_rows is not None and rows + own > self.rotated_rows):
                found.append([])
                rows = 0
            found[-1].append((index, rows))
            rows += own
        return [self._launch(np.array(members, dtype=np.int32), segments) for members in found]

    def _launch(self, members: Table, segments: Table) -> Launch:
        own = segments[members[:, 0]]
        return Launch(members, prefill_tiles(own, self.tokens), int(own[:, STOP].max()))


def _rotated_rows(stops: Any) -> Any:
    """Of segments that end there: whole tiles."""
    return -(-stops // TILE_TOKENS[WIDE_DIM]) * TILE_TOKENS[WIDE_DIM]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of so many query tokens; of segments that `large` does not take only, where that is given."""

    tokens: int
    large: Large | None = None

    def queries(self, segments: Table) -> Table:
        """Segments [n, 6], as `prefill_tiles` takes them: those that are left out ask nothing."""
        if self.large is None:
            return segments
        kept = segments.copy()
        kept[self.large.takes(segments), QUERIES] = 0
        return kept


def prefill_tiles(segments: Sequence[Sequence[int]] | NDArray[np.int32], tile_tokens: int) -> NDArray[np.int32]:
    """All (segment, tile of its queries), those that may see most first, so that none of them ends the launch alone."""
    rows = np.asarray(segments, dtype=np.int64).reshape(-1, len(Segment._fields))
    stops, counts = rows[:, STOP], rows[:, QUERIES]
    tiles = -(-counts // tile_tokens)
    segment = np.repeat(np.arange(len(rows)), tiles)
    index = np.arange(len(segment)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    positions = (stops - counts)[segment] + index * tile_tokens
    order = np.argsort(-positions, kind="stable")
    return np.stack([segment[order], index[order]], axis=1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class ChunkQueries:
    """The segments of a step on the device, for one set of rows that ask.

    `segments` is [segments, 6], the fields of `host_segments`. `tiles` lists the query tiles that layers ask for, and
    `launches` those of large segments. `goes` are what must be decoded first where a past is coded, made once for
    layers that are alike.
    """

    segments: torch.Tensor
    host_segments: tuple[Segment, ...]
    tiles: dict[Tiling, torch.Tensor]
    launches: dict[Tiling, list[Launch]] = field(default_factory=dict)
    goes: dict[tuple[Hashable, ...], list[tuple[Any, ChunkQueries]]] = field(default_factory=dict)


Bring = Callable[[NDArray[np.int32]], Callable[[], torch.Tensor]]


def queries_of(segments: Sequence[Segment], tilings: Iterable[Tiling], bring: Bring) -> Callable[[], ChunkQueries]:
    """These segments for layers with these tilings. `bring` takes an array and says how to get it on the device, once
    all have been taken; so does what is returned.
    """
    table = np.array(segments, dtype=np.int32).reshape(-1, len(Segment._fields))
    there = bring(table)
    tiles, launches = {}, {}
    for tiling in tilings:
        tiles[tiling] = bring(prefill_tiles(tiling.queries(table), tiling.tokens))
        if tiling.large is not None:
            launches[tiling] = [(bring(m), bring(t), n) for m, t, n in tiling.large.launches(table)]
    return lambda: ChunkQueries(
        there(), tuple(segments), {tiling: found() for tiling, found in tiles.items()},
        {tiling: [Launch(m(), t(), n) for m, t, n in found] for tiling, found in launches.items()},
    )  # fmt: skip
