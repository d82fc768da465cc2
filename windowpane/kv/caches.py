"""What one layer keeps: the caches it owns, before any paging.

A model declares a list of these (see `windowpane.models`). A layer that shares another layer's KV owns none; a layer
with both attention and a recurrent state owns two. What experts were visited is one more, for all layers together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from windowpane.kv.formats import dtype_bytes
from windowpane.kv.retention import Routes, State, TokenRetention


class ShardingError(ValueError):
    """Heads can be neither split evenly over the ranks nor replicated evenly."""


def heads_per_rank(heads: int, ranks: int, what: str) -> int:
    """Split `heads` over tensor-parallel ranks; fewer heads than ranks are replicated."""
    if heads % ranks == 0:
        return heads // ranks
    if ranks % heads == 0:
        return 1
    raise ShardingError(
        f"{heads} {what} can be neither split over nor replicated evenly across {ranks} tensor-parallel ranks"
    )


@dataclass(frozen=True, slots=True)
class TokenCache:
    """K and V of one attention layer, per token.

    `latent` means that one vector of `key_dim` is stored and K and V are rebuilt from it. `value_dim` still names the
    width V would have in a stored pair (0 where no pair exists, as in MLA), because other engines store it.
    `replicated` caches are whole on every rank.
    """

    layer: int
    retention: TokenRetention
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False
    replicated: bool = False

    @property
    def row_dims(self) -> tuple[int, ...]:
        """Widths of the vectors stored per token and head."""
        return (self.key_dim,) if self.latent else (self.key_dim, self.value_dim)

    def shard(self, ranks: int) -> TokenCache:
        if self.replicated:
            return self
        return replace(self, kv_heads=heads_per_rank(self.kv_heads, ranks, f"KV heads of layer {self.layer}"))


RECURRENT = "recurrent"  # the part of a state that is not a convolution's tail


@dataclass(frozen=True, slots=True)
class StatePart:
    """`heads` blocks of `elements_per_head` values. `dtype` None means the compute dtype."""

    name: str
    heads: int
    elements_per_head: int
    dtype: str | None = None

    def bytes(self, compute_dtype: str) -> int:
        return self.heads * self.elements_per_head * dtype_bytes(self.dtype or compute_dtype)


@dataclass(frozen=True, slots=True)
class StateCache:
    """One recurrent state of one layer (convolution tail and recurrent part), fixed in size, in so many slots."""

    layer: int
    parts: tuple[StatePart, ...]
    slots: int = 2

    @property
    def retention(self) -> State:
        return State(self.slots)

    def part(self, name: str) -> StatePart:
        return next(part for part in self.parts if part.name == name)

    def in_dtype(self, compute_dtype: str) -> StateCache:
        """The same with a dtype for every part."""
        return replace(self, parts=tuple(replace(p, dtype=p.dtype or compute_dtype) for p in self.parts))

    def with_recurrent_dtype(self, dtype: str) -> StateCache:
        """The same with another dtype for what recurs; the convolution's tail stays as it is."""
        parts = (replace(p, dtype=dtype) if p.name == RECURRENT else p for p in self.parts)
        return replace(self, parts=tuple(parts))

    def shard(self, ranks: int) -> StateCache:
        sharded = tuple(
            replace(p, heads=heads_per_rank(p.heads, ranks, f"{p.name} state heads of layer {self.layer}"))
            for p in self.parts
        )
        return replace(self, parts=sharded)

    def bytes(self, compute_dtype: str) -> int:
        return sum(p.bytes(compute_dtype) for p in self.parts)


@dataclass(frozen=True, slots=True)
class RouteCache:
    """The ids of the `chosen` among `experts` experts that each token visited in each of `layers`.

    One row per token for all layers. Every rank routes alike, so the cache is whole on each.
    """

    layers: tuple[int, ...]
    chosen: int
    experts: int

    @property
    def layer(self) -> int:
        """The last of them: from there on a row is whole."""
        return self.layers[-1]

    @property
    def retention(self) -> Routes:
        return Routes()

    @property
    def dtype(self) -> str:
        return "uint8" if self.experts <= 256 else "int16"

    @property
    def row_bytes(self) -> int:
        return len(self.layers) * self.chosen * (1 if self.dtype == "uint8" else 2)


Cache = TokenCache | StateCache
Kept = Cache | RouteCache
