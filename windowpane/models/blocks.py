"""What a model computes, without torch: embedding → layers → norm → head.

    layer = block, block, …                        each added to the residual stream
    block = norm before → mixer → norm after       norms are optional
    mixer = Attention | GatedDeltaNet | Mamba2 | ShortConv | GatedMLP | Experts | PerLayerInput
          | Sum of blocks that read the same input

The loader, the plan's activation estimate, tensor parallelism and every lowering read this description; nobody changes
it. A new kind of mixer is a dataclass here, a reader in a family, and one class in each lowering that runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from types import UnionType
from typing import Any, TypeVar

from windowpane.kv.caches import Cache, RouteCache, StateCache, TokenCache
from windowpane.models.rope import Rope
from windowpane.models.tensors import TensorSpec

RMS, LAYER = "rms", "layer"
UNGATED = ("relu2",)  # activations of MLPs and experts that have no gate


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of the last dimension: `kind` is RMS, or LAYER, which subtracts the mean first. It has no bias.

    Without `weight` it only norms. `adds_one`: the checkpoint stores w − 1. `across_heads`: the heads of a token are
    normed together, so ranks share one mean.
    """

    eps: float
    weight: TensorSpec | None = None
    kind: str = RMS
    adds_one: bool = False
    across_heads: bool = False


@dataclass(frozen=True, slots=True)
class Projection:
    """Linear layers of one input, one above the other: the outputs of `weights` in this order.

    `splits_inputs`: ranks have some of the inputs each, so that their products are summed.
    """

    weights: tuple[TensorSpec, ...]
    biases: tuple[TensorSpec, ...] = ()
    splits_inputs: bool = False

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec]) -> Projection:
        found = tuple(tensors)
        biases = tuple(t for t in found if t.name.endswith(".bias"))
        weights = tuple(t for t in found if t not in biases)
        return cls(weights, biases, any(t.shard is not None and t.shard.axis == 1 for t in weights))

    @property
    def inputs(self) -> int:
        return self.weights[0].shape[1]


@dataclass(frozen=True, slots=True)
class Temperature:
    """A factor of queries that grows with their position: 1 + `slope` × log(1 + ⌊(position + 1) / `positions`⌋)."""

    slope: float
    positions: float


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of layer `layer` over `cache`: its own, or that of an earlier layer whose K and V it shares.

    `qkv` makes queries, then K and V where the layer owns them (one vector for both where the cache is latent). What a
    token sees is the cache's retention. `sinks`: a logit per query head that takes weight and gives no value.
    `gated`: the first weight of `qkv` makes each head's query and behind it a gate as wide, whose sigmoid multiplies
    what the head attended.
    """

    layer: int
    cache: TokenCache
    qkv: Projection
    out: Projection
    rope: Rope | None
    scale: float
    softcap: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    sinks: TensorSpec | None = None
    temperature: Temperature | None = None
    gated: bool = False

    @property
    def owns_kv(self) -> bool:
        return self.cache.layer == self.layer

    @property
    def query_width(self) -> int:
        return self.out.inputs

    @property
    def query_heads(self) -> int:
        return self.query_width // self.cache.key_dim


# How a checkpoint orders what the inputs of Gated DeltaNet make. By section: q, k, v, z, b and a, each of all heads. By
# key head: all but b and a of one key head after another, then b and a likewise; or b and a alone. Tiled: by section,
# with the first value head of every key head in front of the second of every one, in `out` and all else too.
BY_SECTION, BY_KEY_HEAD, GATES_BY_KEY_HEAD, TILED = "by section", "by key head", "gates by key head", "tiled"


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """A recurrent state of a key_dim × value_dim matrix per value head, written by the gated delta rule.

    `inputs` makes q, k, v, a gate z, and b and a of each value head. q, k and v pass a causal convolution and SiLU. The
    state decays by exp(−exp(A_log) · softplus(a + dt_bias)), learns what it lacks of v at k with the rate σ(b), and is
    read at q; out(norm(read) · SiLU(z)) is the result. `order` says where a checkpoint has the outputs of heads.
    """

    layer: int
    cache: StateCache
    inputs: Projection
    conv: TensorSpec
    a_log: TensorSpec
    dt_bias: TensorSpec
    norm: Norm
    out: Projection
    order: str = BY_SECTION

    @property
    def key_heads(self) -> int:
        return self.cache.part("conv_k").heads

    @property
    def value_heads(self) -> int:
        return self.cache.part("recurrent").heads

    @property
    def value_dim(self) -> int:
        return self.out.inputs // self.value_heads

    @property
    def key_dim(self) -> int:
        return self.cache.part("recurrent").elements_per_head // self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A recurrent state of a head_dim × state_dim matrix per head, written and read through B and C of its group.

    `inputs` makes a gate z, x, B, C, and a step dt of each head, all of them times `multipliers` where there are some.
    x, B and C pass a causal convolution and SiLU. With dt = softplus(dt + dt_bias) within `dt_limits`, the state decays
    by exp(−dt · exp(A_log)) and gains dt · x Bᵀ; y = state · C + D · x. The result is out(norm(y · SiLU(z))), or, where
    `norms_first`, out(norm(y) · SiLU(z)). `norms_groups`: what belongs to one group is normed by itself.
    """

    layer: int
    cache: StateCache
    inputs: Projection
    conv: TensorSpec
    conv_bias: TensorSpec | None
    a_log: TensorSpec
    dt_bias: TensorSpec
    skip: TensorSpec
    out: Projection
    norm: Norm | None = None
    norms_first: bool = False
    norms_groups: bool = False
    dt_limits: tuple[float, float] = (0.0, math.inf)
    multipliers: tuple[float, float, float, float, float] | None = None

    @property
    def heads(self) -> int:
        return self.cache.part("recurrent").heads

    @property
    def head_dim(self) -> int:
        return self.out.inputs // self.heads

    @property
    def groups(self) -> int:
        return self.cache.part("conv_bc").heads

    @property
    def state_dim(self) -> int:
        return self.cache.part("recurrent").elements_per_head // self.head_dim


@dataclass(frozen=True, slots=True)
class ShortConv:
    """LFM2's mixer: `inputs` makes B, C and x; out(C · convolution(B · x)), whose state is the convolution's tail."""

    layer: int
    cache: StateCache
    inputs: Projection
    conv: TensorSpec
    conv_bias: TensorSpec | None
    out: Projection


StateMixer = GatedDeltaNet | Mamba2 | ShortConv


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(activation(`gate_multiplier` × gate) × up); `gate_up` makes the gate's values first.

    Without a gate, where `gate_up` makes as many values as `down` takes: down(activation(up)).
    `out_gate`: the result is multiplied by the sigmoid of this projection of the input, one value per token.
    """

    gate_up: Projection
    down: Projection
    activation: str
    out_gate: Projection | None = None
    gate_multiplier: float = 1.0

    @property
    def has_gate(self) -> bool:
        return sum(weight.shape[0] for weight in self.gate_up.weights) > self.down.inputs


# How a router's logits become scores. The first two make a token's scores of all experts sum to 1, or of the chosen
# ones; a sigmoid takes each by itself, before the choice or behind it.
SOFTMAX, CHOSEN_SOFTMAX, SIGMOID, CHOSEN_SIGMOID = "softmax", "chosen_softmax", "sigmoid", "chosen_sigmoid"


@dataclass(frozen=True, slots=True)
class Router:
    """Which `chosen` experts a token visits, and the share of each in the result.

    Scores are made of `logit_multiplier` × weight · norm(x) + bias. Those with the best score + `correction` are
    chosen, the lower one of two that are alike; where experts are in `groups`, from the `chosen_groups` whose two best
    sum up highest. An expert's share is its score, divided by the sum of the chosen where `renormalizes`, times
    `multiplier` and its own `expert_scales`.
    """

    weight: TensorSpec
    chosen: int
    scoring: str = SOFTMAX
    bias: TensorSpec | None = None
    correction: TensorSpec | None = None
    expert_scales: TensorSpec | None = None
    norm: Norm | None = None
    logit_multiplier: float = 1.0
    renormalizes: bool = False
    multiplier: float = 1.0
    groups: int = 1
    chosen_groups: int = 1

    @property
    def experts(self) -> int:
        return self.weight.shape[0]


@dataclass(frozen=True, slots=True)
class ExpertProjection:
    """A linear layer for each expert: the outputs of `weights` [experts, outputs, inputs] in this order.

    `alternates`: the one weight has outputs of gate and up in turn.
    """

    weights: tuple[TensorSpec, ...]
    biases: tuple[TensorSpec, ...] = ()
    alternates: bool = False

    @property
    def inputs(self) -> int:
        return self.weights[0].shape[1 if self.weights[0].transposed else 2]


@dataclass(frozen=True, slots=True)
class Experts:
    """Σ share × expert(norm(x)) over the experts that the router chooses from x; see `GatedMLP` for an expert.

    `limit`: gate and up are clamped to it, and an expert is down(gate × σ(`alpha` × gate) × (up + 1)). `weighs_inputs`:
    a share multiplies what its expert reads, not what it gives.
    """

    layer: int
    router: Router
    gate_up: ExpertProjection
    down: ExpertProjection
    activation: str
    norm: Norm | None = None
    limit: float | None = None
    alpha: float = 1.702
    weighs_inputs: bool = False


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """Gemma's second embedding: projection(activation(gate(hidden)) × the token's own values for layer `layer`)."""

    layer: int
    gate: Projection
    projection: Projection
    activation: str


@dataclass(frozen=True, slots=True)
class Sum:
    """Branches that read the same input, each with norms of its own; their results are added."""

    branches: tuple[Block, ...]


Mixer = Attention | GatedDeltaNet | Mamba2 | ShortConv | GatedMLP | Experts | PerLayerInput | Sum


@dataclass(frozen=True, slots=True)
class Block:
    """residual + multiplier × after(mixer(before(residual))); as a branch of a Sum nothing is added."""

    mixer: Mixer
    before: Norm | None = None
    after: Norm | None = None
    multiplier: float = 1.0


@dataclass(frozen=True, slots=True)
class Layer:
    """Blocks one after another; the result is multiplied by `scalar`, a tensor of one value, where there is one."""

    blocks: tuple[Block, ...]
    scalar: TensorSpec | None = None


@dataclass(frozen=True, slots=True)
class PerLayerEmbedding:
    """A table that gives every layer `width` values of its own per token, mixed with a projection of the embedding."""

    table: TensorSpec
    projection: Projection
    norm: Norm
    width: int


@dataclass(frozen=True, slots=True)
class Join:
    """How a drafter begins: projection([norm(embedding of a token), norm(final hidden state of the one before)]).

    The embedding is the target's, with its multiplier; so is the first hidden state. The next ones are the drafter's
    own: `back` takes its final hidden state to the target's width, None where it has that already.
    """

    projection: Projection
    embedding_norm: Norm | None = None
    hidden_norm: Norm | None = None
    back: Projection | None = None


@dataclass(frozen=True, slots=True)
class Centroids:
    """A head that scores some of the vocabulary: the tokens of the `chosen` clusters that `scores` ranks highest.

    `ordering` lists the tokens of one cluster after another; all clusters have as many.
    """

    scores: Projection
    ordering: TensorSpec
    chosen: int


@dataclass(frozen=True)
class Decoder:
    """A text model. Without `head` the embedding is the LM head. With `routes` it keeps which experts tokens visit.

    `first_layer` is the number of its first layer: those of a drafter follow its target's, since both have caches in
    one arena. A drafter with a `join` looks no tokens up in `embedding`, which is its head.
    """

    embedding: TensorSpec
    layers: tuple[Layer, ...]
    norm: Norm
    head: Projection | None = None
    per_layer: PerLayerEmbedding | None = None
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    routes: RouteCache | None = None
    join: Join | None = None
    centroids: Centroids | None = None
    first_layer: int = 0

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """Every attention, in the order in which they run."""
        return tuple(each(self.layers, Attention))

    @cached_property
    def state_mixers(self) -> tuple[StateMixer, ...]:
        """Every mixer with a recurrent state, in the order in which they run."""
        return tuple(each(self.layers, StateMixer))

    @cached_property
    def caches(self) -> tuple[Cache, ...]:
        """What layers keep, in the order in which they run."""
        keepers = each(self.layers, Attention | StateMixer)
        return tuple(k.cache for k in keepers if not isinstance(k, Attention) or k.owns_kv)

    @cached_property
    def shared_layers(self) -> frozenset[int]:
        """Layers whose K and V later layers read."""
        return frozenset(a.cache.layer for a in self.attentions if not a.owns_kv)

    @cached_property
    def last_keeper(self) -> int | None:
        """Which layer is the last that keeps anything: nothing after it changes what is kept of a token."""
        layers = [cache.layer for cache in self.caches]
        last = max(layers if self.routes is None else [*layers, self.routes.layer], default=None)
        return None if last is None else last - self.first_layer

    @cached_property
    def last_keeping_block(self) -> int:
        """The last block of that layer that keeps anything."""
        assert self.last_keeper is not None
        keepers = Attention | StateMixer | Experts if self.routes else Attention | StateMixer
        blocks = self.layers[self.last_keeper].blocks
        return max(index for index, block in enumerate(blocks) if any(each(block, keepers)))

    @cached_property
    def widest_mlp(self) -> int:
        """The most intermediate values that one token has in a block."""
        blocks = [block for layer in self.layers for block in layer.blocks]
        return max(
            sum(mlp.down.inputs for mlp in each(block, GatedMLP))
            + sum(experts.down.inputs * experts.router.chosen for experts in each(block, Experts))
            for block in blocks
        )


_Described = TypeVar("_Described")


def each(described: Any, kind: type[_Described] | UnionType) -> Iterator[_Described]:
    """Every part of a description that is of this kind, in the order in which they run."""
    if isinstance(described, kind):
        yield described
        return
    for part in described if isinstance(described, tuple | list) else _parts(described).values():
        if isinstance(part, tuple | list) or _part_names(part.__class__):
            yield from each(part, kind)
        elif isinstance(part, kind):
            yield part


def tensors_of(described: Any) -> dict[str, TensorSpec]:
    """Every tensor that a description names, once, by its name."""
    return {tensor.name: tensor for tensor in each(described, TensorSpec)}


_CACHES = TokenCache | StateCache


def on_rank(described: _Described, ranks: int) -> _Described:
    """The description as one of `ranks` tensor-parallel ranks computes it."""

    def cut(part: Any) -> Any:
        return part.on_rank(ranks) if isinstance(part, TensorSpec) else part.shard(ranks)

    return _changed(described, TensorSpec | _CACHES, cut)


def numbered_from(decoder: Decoder, first: int) -> Decoder:
    """The same model with its layers numbered from `first` on."""

    def shift(part: Any) -> Any:
        caches = {"cache": shift(part.cache)} if isinstance(part, Attention | StateMixer) else {}
        return replace(part, layer=part.layer + first, **caches)

    # Per-layer inputs keep their numbers: they are counted from the decoder's own first layer.
    return replace(_changed(decoder, Attention | StateMixer | Experts, shift), first_layer=first)


def _changed(described: _Described, kind: Any, change: Callable[[Any], Any]) -> _Described:
    """The description with every part of this kind changed."""
    changed: Any = described
    if isinstance(described, kind):
        changed = change(described)
    elif isinstance(described, tuple):
        changed = tuple(_changed(part, kind, change) for part in described)
    elif parts := _parts(described):
        changed = replace(described, **{name: _changed(part, kind, change) for name, part in parts.items()})  # type: ignore[type-var]
    found: _Described = changed
    return found


def _parts(described: Any) -> dict[str, Any]:
    return {name: getattr(described, name) for name in _part_names(described.__class__)}


@cache
def _part_names(kind: type) -> tuple[str, ...]:
    """The fields of a description that may name tensors or caches; these themselves and a rotation, say, have none."""
    if not is_dataclass(kind) or issubclass(kind, Rope | TensorSpec | TokenCache | StateCache):
        return ()
    return tuple(field.name for field in fields(kind))
