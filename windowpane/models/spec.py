"""What a model is, without torch: its caches, its tensors and how they shard. Planning, loading and TP read this."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from windowpane.kv.caches import Cache, ShardingError, StateCache, TokenCache

if TYPE_CHECKING:
    from windowpane.models.config import Config
    from windowpane.models.quantization import Quantization


class ModelError(ValueError):
    """The configuration cannot be read as a model; the message names the field and the way out."""


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
class Cut:
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

    def cut(self, place: RankPlace) -> Cut | None:
        """Where in the whole tensor that lies for one rank; None where every rank holds all of it."""
        if self.shard is None or place.ranks == 1:
            return None
        return Cut(self.shard.axis, self.shard.ranges(place))

    def checkpoint_entries(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor in the checkpoint file that this describes."""
        if not self.stacked:
            yield self.name, self.shape
            return
        for index in range(self.shape[0]):
            yield self.name.replace("{}", str(index)), self.shape[1:]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """`architecture` is the config's own name, `family` the module that read it.

    `widest_mlp` is the most intermediate values one token has in a layer: the MLP's width, or those of all experts it
    visits. `query_heads` must divide evenly over tensor-parallel ranks. `weight_scheme` (int4, int8, fp8, mxfp4) and
    `kv_cache_scheme` (fp8_e4m3, else the config's own words) are what the checkpoint's quantization says, None where it
    says nothing. `text` is the config of the text model, for what only running it needs (norms, rotation, scales).
    `shared_caches` are those that layers which share KV do without. `notes` are doubts worth telling a user.
    """

    name: str
    architecture: str
    family: str
    dtype: str
    hidden_size: int
    widest_mlp: int
    query_heads: int
    vocab_size: int
    num_layers: int
    max_position: int
    caches: tuple[Cache, ...]
    tensors: tuple[TensorSpec, ...] = field(repr=False)
    text: Config = field(repr=False, compare=False)
    quantization: Quantization | None = None
    shared_caches: tuple[TokenCache, ...] = ()
    notes: tuple[str, ...] = ()

    def on_rank(self, ranks: int) -> ModelSpec:
        """The model as one of `ranks` ranks computes it: its heads, caches and tensors. The vocabulary stays whole."""
        if ranks == 1:
            return self
        return replace(
            self,
            query_heads=self.query_heads // ranks,
            caches=tuple(cache.shard(ranks) for cache in self.caches),
            shared_caches=tuple(cache.shard(ranks) for cache in self.shared_caches),
            tensors=tuple(tensor.on_rank(ranks) for tensor in self.tensors if tensor.tower is None),
        )

    @property
    def token_caches(self) -> tuple[TokenCache, ...]:
        return tuple(c for c in self.caches if isinstance(c, TokenCache))

    @property
    def state_caches(self) -> tuple[StateCache, ...]:
        return tuple(c for c in self.caches if isinstance(c, StateCache))

    @property
    def weight_scheme(self) -> str | None:
        return self.quantization.scheme if self.quantization else None

    @property
    def kv_cache_scheme(self) -> str | None:
        return self.quantization.kv_cache_scheme if self.quantization else None
