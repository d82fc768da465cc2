"""Checkpoint tensors, without torch: names, shapes, and which part of each is whose of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from windowpane.kv.caches import ShardingError


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which of how many tensor-parallel ranks this is."""

    rank: int
    ranks: int


ONLY_RANK = RankPlace(0, 1)


@dataclass(frozen=True, slots=True)
class Shard:
    """Split `axis` over ranks. `sections` are (length, units) of the parts that lie one after another on that axis.

    Each section is split in whole units (heads, experts or rows) by itself, so that a fused q|k|v stays q|k|v on every
    rank; a section with fewer units than ranks is replicated.
    """

    axis: int
    sections: tuple[tuple[int, int], ...]

    def fits(self, ranks: int) -> bool:
        return all(units % ranks == 0 or ranks % units == 0 for _, units in self.sections)

    def rank_length(self, ranks: int) -> int:
        """How long `axis` is on one rank."""
        if not self.fits(ranks):
            raise ShardingError(f"{self.sections} (length, units) cannot be split evenly over {ranks} ranks")
        return sum(length // min(units, ranks) for length, units in self.sections)

    def ranges(self, place: RankPlace) -> tuple[range, ...]:
        """Which parts of `axis` this rank holds: one run of each section, together `rank_length` long."""
        rank, ranks = place.rank, place.ranks
        self.rank_length(ranks)  # raises where the sections do not divide
        found, first = [], 0
        for length, units in self.sections:
            parts = min(units, ranks)
            size = length // parts
            start = first + rank * parts // ranks * size  # neighbouring ranks share what is replicated
            found.append(range(start, start + size))
            first += length
        return tuple(found)


@dataclass(frozen=True, slots=True)
class RankSlice:
    """These runs of one axis of a tensor, one after another: what a rank reads of it."""

    axis: int
    ranges: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One checkpoint tensor.

    `linear` marks the weights that quantization applies to; they are stored [..., out, in], or [..., in, out] where
    `transposed`. A `stacked` tensor is `shape[0]` checkpoint tensors of shape `shape[1:]`, whose number replaces `{}`
    in the name. `part` is what the bytes are for: embedding, attention, mlp, experts, state or other. `tower` names the
    part (vision, audio) that the text engine does not load. `dtype` None means the checkpoint's dtype.
    """

    name: str
    shape: tuple[int, ...]
    shard: Shard | None = None
    linear: bool = False
    dtype: str | None = None
    tower: str | None = None
    part: str = "other"
    stacked: bool = False
    transposed: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def module(self) -> str:
        """The module that owns this weight, as quantization configs name it."""
        return self.name.removesuffix(".weight")

    def on_rank(self, ranks: int) -> TensorSpec:
        """What one of `ranks` tensor-parallel ranks holds of it."""
        if self.shard is None or ranks == 1:
            return self
        shape = list(self.shape)
        shape[self.shard.axis] = self.shard.rank_length(ranks)
        return replace(self, shape=tuple(shape), shard=None)

    def cut(self, place: RankPlace) -> RankSlice | None:
        """Where in the whole tensor that lies for one rank; None where every rank holds all of it."""
        if self.shard is None or place.ranks == 1:
            return None
        return RankSlice(self.shard.axis, self.shard.ranges(place))

    def checkpoint_entries(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor in the checkpoint file that this describes."""
        if not self.stacked:
            yield self.name, self.shape
            return
        for index in range(self.shape[0]):
            yield self.name.replace("{}", str(index)), self.shape[1:]

    def rank_entries(self, place: RankPlace) -> list[tuple[str, RankSlice | None]]:
        """The tensors of the checkpoint file that one rank reads of, and what of each."""
        cut, names = self.cut(place), [name for name, _ in self.checkpoint_entries()]
        if cut is None or not self.stacked:
            return [(name, cut) for name in names]
        if cut.axis == 0:
            return [(names[index], None) for some in cut.ranges for index in some]
        return [(name, RankSlice(cut.axis - 1, cut.ranges)) for name in names]
