"""What one step computes, as attention sees it: whose tokens lie where, and which of them ask."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    """`wanted` are the rows whose logits are asked for; `narrow` gives the queries once only those go on."""

    tokens: torch.Tensor
    positions: torch.Tensor
    segments: tuple[Segment, ...]
    wanted: torch.Tensor

    def all_queries(self) -> list[Queries]:
        return [
            Queries(s.row, s.row + s.stop - s.start, self.positions[s.row : s.row + s.stop - s.start])
            for s in self.segments
        ]

    def wanted_queries(self) -> list[Queries]:
        """As `all_queries`, for the rows of `wanted` alone; segments that want nothing have none."""
        queries, first = [], 0
        for s in self.segments:
            inside = self.wanted[(self.wanted >= s.row) & (self.wanted < s.end_row)]
            queries.append(Queries(first, first + len(inside), self.positions[inside]))
            first += len(inside)
        return queries
