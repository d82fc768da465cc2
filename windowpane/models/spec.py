"""What a model is, without torch: its caches, its tensors, and the blocks it computes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from windowpane.kv.caches import Cache, RouteCache, StateCache, TokenCache
from windowpane.models.blocks import Decoder, Experts, each, on_rank
from windowpane.models.tensors import TensorSpec

if TYPE_CHECKING:
    from windowpane.models.config import Config
    from windowpane.models.ggml import StoredTypes
    from windowpane.models.quantization import Quantization


@dataclass(frozen=True, slots=True)
class Drafter:
    """A model that drafts for another. `decoder` is what it computes beside its target, whose arena has its caches.

    `spec` is the model that it was read from, None where its layers lie in the target's own checkpoint, as `tensors`.
    """

    decoder: Decoder = field(repr=False)
    spec: ModelSpec | None = None
    tensors: tuple[TensorSpec, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """`architecture` is the config's own name, `family` the module that read it.

    `widest_mlp` is the most intermediate values one token has in a layer: the MLP's width, or those of all experts it
    visits. `query_heads` must divide evenly over tensor-parallel ranks. `weight_scheme` (int4, int8, fp8, mxfp4) and
    `kv_cache_scheme` (fp8_e4m3, else the config's own words) are what the checkpoint's quantization says, None where it
    says nothing. `decoder` is what the model computes, None where it can be planned only; `planned_only` then says what
    no lowering has. `text` is the config of the text model. `shared_caches` are those
    that layers which share KV do without. `notes` are doubts to tell a user. `drafter` is a model that drafts for it.
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
    decoder: Decoder | None = field(default=None, repr=False)
    quantization: Quantization | StoredTypes | None = None
    shared_caches: tuple[TokenCache, ...] = ()
    notes: tuple[str, ...] = ()
    planned_only: str = ""
    drafter: Drafter | None = None

    def with_drafter(self, drafter: Drafter) -> ModelSpec:
        """The model with the caches of both, and with the tensors that its checkpoint has for the drafter."""
        caches, tensors = (*self.caches, *drafter.decoder.caches), (*self.tensors, *drafter.tensors)
        return replace(self, caches=caches, tensors=tensors, drafter=drafter)

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
            decoder=on_rank(self.decoder, ranks),
            drafter=self.drafter and replace(self.drafter, decoder=on_rank(self.drafter.decoder, ranks)),
        )

    def with_routes(self) -> ModelSpec:
        """The model as it runs where the experts that tokens visit are kept. Raises ValueError where there are none."""
        if self.decoder is None:
            raise ValueError(f"{self.name} can be planned but not run yet")
        found: list[Experts] = list(each(self.decoder.layers, Experts))
        if not found:
            raise ValueError(f"{self.name} has no experts")
        chosen = {experts.router.chosen for experts in found}
        if len(chosen) > 1:
            raise ValueError(f"layers of {self.name} visit different numbers of experts, {sorted(chosen)}")
        layers = tuple(experts.layer for experts in found)
        routes = RouteCache(layers, chosen.pop(), max(experts.router.experts for experts in found))
        return replace(self, decoder=replace(self.decoder, routes=routes))

    def expanded(self) -> ModelSpec:
        """The model with every weight in its dtype, whatever the file has."""
        return replace(self, quantization=None)

    @property
    def routes(self) -> RouteCache | None:
        """Beside `caches`, which are the model's own: the experts that tokens visit, where they are kept."""
        return self.decoder.routes if self.decoder is not None else None

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
