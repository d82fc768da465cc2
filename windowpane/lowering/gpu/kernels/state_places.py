"""Where the states of a step's sequences lie in the arena, as kernels read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from windowpane.schedule.step import Segment

# Of a table of segments, as kernels read it: the fields of one, and which of them say where its rows begin and how many
# there are.
FIELDS = tl.constexpr(len(Segment._fields))
ROW, COUNT = (tl.constexpr(Segment._fields.index(name)) for name in ("row", "q_count"))


class StatePlaces(NamedTuple):
    """Of each sequence of a step: the decoding ones, then those of segments.

    `before` and `after` are page offsets (units of OFFSET_UNIT_BYTES) of the state that is read and the one that is
    written; `starts` is the position of the sequence's first row in this step: 0 begins with zeros whatever the page
    holds, -1 is a padding row, which reads and writes nothing. Where both are one page, `aside` has the tails that it
    began with: programs read those of channels that others write. What recurs has one program that reads and writes it.
    """

    before: torch.Tensor  # int32 [sequences]
    after: torch.Tensor
    starts: torch.Tensor
    aside: torch.Tensor | None = None  # [sequences, elements of all tails]

    def among(self, sequences: slice) -> StatePlaces:
        return StatePlaces(*(None if part is None else part[sequences] for part in self))  # type: ignore[arg-type]

    @property
    def arguments(self) -> tuple[torch.Tensor | int | None, ...]:
        """As kernels take them: BEFORE, AFTER, STARTS, ASIDE, aside_stride."""
        return *self, 0 if self.aside is None else self.aside.stride(0)


class StatePart(NamedTuple):
    """One part of a layer's state in every page: [heads, elements] from element `first` of a page on."""

    arena: torch.Tensor  # flat, in the part's dtype
    first: int
    unit: int  # elements between two page offsets
    heads: int
    elements: int


def snapshot_tables(positions: Sequence[Sequence[int]], pages: NDArray[np.int32]) -> NDArray[np.int32]:
    """As kernels take SNAPSHOTS, for each row of `pages` [stripes, snapshots]: where in it those of each segment begin,
    where the last ones end, and then of each the position and the page that gets the state in front of it. `positions`
    are those of each segment, in order.
    """
    begins = len(positions) + 1 + 2 * np.cumsum([0, *map(len, positions)])
    tables = np.empty((len(pages), len(begins) + 2 * pages.shape[1]), dtype=np.int32)
    tables[:, : len(begins)] = begins
    tables[:, len(begins) :: 2] = [position for of_segment in positions for position in of_segment]
    tables[:, len(begins) + 1 :: 2] = pages
    return tables


@triton.jit
def snapshots_of(SNAPSHOTS, segment):
    """Where in the table those of a segment begin and end."""
    return tl.load(SNAPSHOTS + segment), tl.load(SNAPSHOTS + segment + 1)
