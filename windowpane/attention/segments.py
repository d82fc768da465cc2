"""A step's segments as prefill kernels know them, and how a layer cuts their queries into tiles."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from windowpane.attention.mask import Mask
from windowpane.schedule.step import Segment

QUERIES = 5  # the column of a segment's queries


def window_edge(segment: Segment, mask: Mask, tile_tokens: int) -> int:
    """The tile of keys of which only the later part is held; -1 where tiles are held whole."""
    first = mask.first_visible(segment.start)
    return -1 if first % tile_tokens == 0 else first // tile_tokens


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of so many query tokens; of segments with fewer than `below_queries` queries only, where that is given."""

    tokens: int
    below_queries: int | None = None

    def queries(self, segments: NDArray[np.int32]) -> NDArray[np.int32]:
        """Segments [n, 6], as `prefill_tiles` takes them: those that are left out ask nothing."""
        if self.below_queries is None:
            return segments
        kept = segments.copy()
        kept[segments[:, QUERIES] >= self.below_queries, QUERIES] = 0
        return kept


@dataclass(frozen=True, slots=True)
class ChunkQueries:
    """The segments of a step on the device, for one set of rows that ask.

    `segments` is [segments, 6], the fields of `host_segments`. `tiles` lists the query tiles that layers ask for.
    `goes` are what must be decoded first where a past is coded, made once for layers that are alike.
    """

    segments: torch.Tensor
    host_segments: tuple[Segment, ...]
    tiles: dict[Tiling, torch.Tensor]
    goes: dict[tuple[Hashable, ...], list[tuple[Any, ChunkQueries]]] = field(default_factory=dict)
