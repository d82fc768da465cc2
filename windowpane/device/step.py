"""What one step computes, as attention sees it: whose tokens lie where, and which of them ask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence: positions [start, stop), rows [row, row + stop - start) of the step."""

    slot: int
    start: int
    stop: int
    row: int

    @property
    def end_row(self) -> int:
        return self.row + self.stop - self.start


@dataclass(frozen=True, slots=True)
class Queries:
    """The rows that still ask, segment by segment: rows [first, last) of the query tensor, at these positions."""

    first: int
    last: int
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """`wanted` are the rows whose logits are asked for.

    The first rows are decoding ones, one token per slot, all of them wanted; `segments` are the chunks behind them.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]
    wanted: torch.Tensor
    decode_slots: NDArray[np.int64]
    decode_positions: NDArray[np.int64]

    @property
    def num_decoding(self) -> int:
        return len(self.decode_slots)

    def all_queries(self) -> list[Queries]:
        """The rows of each segment."""
        return [Queries(s.row, s.end_row, self.positions[s.row : s.end_row]) for s in self.segments]

    def wanted_queries(self) -> list[Queries]:
        """As `all_queries`, once only the rows of `wanted` go on; segments that want nothing have none."""
        queries, first = [], self.num_decoding
        for s in self.segments:
            inside = self.wanted[(self.wanted >= s.row) & (self.wanted < s.end_row)]
            queries.append(Queries(first, first + len(inside), self.positions[inside]))
            first += len(inside)
        return queries
