"""Chunks as prefill kernels know them, and how a layer cuts their queries into tiles. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windowpane.attention.mask import Mask

QUERIES = 5  # the column of a segment's queries


class ChunkSegment(NamedTuple):
    """Tokens [start, stop) of a slot, at rows `row`.. of the step; the last q_count of them ask, from rows `q_row`.."""

    slot: int
    start: int
    stop: int
    row: int
    q_row: int
    q_count: int

    def first_held(self, mask: Mask) -> int:
        """The first past token that a query of the segment may see."""
        return mask.first_visible(self.start)

    def window_edge(self, mask: Mask, tile_tokens: int) -> int:
        """The tile of keys of which only the later part is held; -1 where tiles are held whole."""
        first = self.first_held(mask)
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
