"""What ranks tell one another while they compute: sums, parts side by side, and rank 0's tokens.

A decoder is handed its group and asks it at three places: after a product whose inputs are shared out, after looking up
an embedding, and for logits. `ALONE` does nothing, so that one rank runs exactly what it would run without groups.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from windowpane.lowering.strips import StripWeight
from windowpane.models.tensors import ONLY_RANK, RankPlace


class RankGroup(Protocol):
    """All ranks of one model, as one of them sees them. Every rank makes the same calls in the same order."""

    @property
    def place(self) -> RankPlace: ...

    @property
    def in_graphs(self) -> bool:
        """Whether calls can be captured in CUDA graphs."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; may be computed in place."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] of each rank side by side, [rows, ranks × width], on every rank."""
        ...


class _Alone:
    place = ONLY_RANK
    in_graphs = True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE: RankGroup = _Alone()


def look_up(table: torch.Tensor | StripWeight, tokens: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Rows of an embedding whose vocabulary is shared out over ranks: one has a token's row, the others add zeros."""
    if group.place.ranks == 1:
        return _rows(table, tokens)
    own = tokens - group.place.rank * len(table)
    elsewhere = (own < 0) | (own >= len(table))
    rows = _rows(table, own.masked_fill(elsewhere, 0))
    return group.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))


def _rows(table: torch.Tensor | StripWeight, which: torch.Tensor) -> torch.Tensor:
    return table.rows(which) if isinstance(table, StripWeight) else F.embedding(which, table)
