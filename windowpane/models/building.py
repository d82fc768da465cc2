"""How families put their decoders together: blocks from tensors, layers from blocks, and a spec from all of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windowpane.kv.caches import TokenCache
from windowpane.models.blocks import (
    RMS,
    Attention,
    Block,
    Decoder,
    ExpertProjection,
    Experts,
    GatedMLP,
    Layer,
    Mixer,
    Norm,
    PerLayerEmbedding,
    PerLayerInput,
    Projection,
    Router,
    Sum,
    tensors_of,
)
from windowpane.models.config import Config
from windowpane.models.parts import Shape, attention_tensors, embeddings, mlp_tensors, model_spec, per_layer_tensors
from windowpane.models.rope import Rope
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

Tensors = Sequence[TensorSpec]


@dataclass(frozen=True, slots=True)
class Norms:
    """A family's norms: `width` values, all of one kind and epsilon."""

    width: int
    eps: float
    adds_one: bool = False
    kind: str = RMS

    def __call__(self, name: str) -> Norm:
        return Norm(self.eps, TensorSpec(f"{name}.weight", (self.width,)), self.kind, self.adds_one)

    def of_heads(self, head_dim: int) -> Norms:
        """For each head of queries and keys by itself."""
        return replace(self, width=head_dim)

    def pre(self, prefix: str, mixer: Mixer, mlp: Mixer, multiplier: float = 1.0) -> tuple[Block, Block]:
        """Llama's layer: a norm before each block."""
        return (
            Block(mixer, before=self(f"{prefix}input_layernorm"), multiplier=multiplier),
            Block(mlp, before=self(f"{prefix}post_attention_layernorm"), multiplier=multiplier),
        )

    def post(self, prefix: str, mixer: Attention, mlp: Mixer) -> tuple[Block, Block]:
        """OLMo's layer: a norm after each block."""
        return (
            Block(mixer, after=self(f"{prefix}post_attention_layernorm")),
            Block(mlp, after=self(f"{prefix}post_feedforward_layernorm")),
        )

    def both(self, prefix: str, mixer: Attention, mlp: Mixer) -> tuple[Block, Block]:
        """Gemma's layer: a norm before and after each block."""
        attends, feeds = self.post(prefix, mixer, mlp)
        return (
            replace(attends, before=self(f"{prefix}input_layernorm")),
            replace(feeds, before=self(f"{prefix}pre_feedforward_layernorm")),
        )


def attention(
    prefix: str,
    shape: Shape,
    cache: TokenCache,
    *,
    rope: Rope | None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: bool = False,
    out_bias: bool | None = None,
    head_norms: Norms | None = None,
    layer: int | None = None,
    tensors: Tensors | None = None,
    sinks: TensorSpec | None = None,
    gated: bool = False,
) -> Attention:
    """Attention with Llama's names for its projections, or over `tensors`, of which the output projection is last.

    `layer` shares another layer's `cache`, and its projections of K and V with it; left out, it owns the cache.
    """
    owns_kv = layer is None or layer == cache.layer
    if tensors is None:
        has_v = not cache.latent
        tensors = attention_tensors(
            prefix, shape, bias=bias, out_bias=out_bias, gated=gated, owns_kv=owns_kv, has_v=has_v
        )
    makes_qkv, makes_out = _split_last(tensors)
    norms = head_norms or (lambda name: None)
    return Attention(
        layer=cache.layer if layer is None else layer,
        cache=cache,
        qkv=makes_qkv,
        out=makes_out,
        rope=rope,
        scale=shape.head_dim**-0.5 if scale is None else scale,
        softcap=softcap,
        q_norm=norms(f"{prefix}q_norm"),
        k_norm=norms(f"{prefix}k_norm") if owns_kv else None,
        sinks=sinks,
        gated=gated,
    )


def gated_mlp(
    prefix: str, shape: Shape, width: int, activation: str, *, bias: bool = False, tensors: Tensors | None = None
) -> GatedMLP:
    """An MLP with Llama's names for its projections, or over `tensors`, of which the one down is last."""
    if tensors is None:
        tensors = mlp_tensors(prefix, shape.hidden, width, bias=bias)
    return GatedMLP(*_split_last(tensors), activation)


def experts(layer: int, router: Router, tensors: Tensors, activation: str, **rest: Any) -> Experts:
    """Experts over `tensors`, of which the one down is last, each with its bias behind it where it has one.

    `rest` are the other fields of `Experts`, and `alternates` of their first projection.
    """
    alternates = rest.pop("alternates", False)
    biases = tuple(t for t in tensors if t.name.endswith("bias"))
    *up, down = (t for t in tensors if t not in biases)
    return Experts(
        layer,
        router,
        ExpertProjection(tuple(up), biases[:-1], alternates),
        ExpertProjection((down,), biases[-1:]),
        activation,
        **rest,
    )


def beside(routed: Experts, shared: GatedMLP | None) -> Mixer:
    """Routed experts and the one that every token visits, where there is one."""
    return routed if shared is None else Sum((Block(routed), Block(shared)))


def _split_last(tensors: Tensors) -> tuple[Projection, Projection]:
    """All projections but the last, joined, and the last: a weight, or a weight and its bias."""
    count = 2 if tensors[-1].name.endswith(".bias") else 1
    return Projection.of(tensors[:-count]), Projection.of(tensors[-count:])


def per_layer_inputs(
    prefix: str, shape: Shape, vocab: int, width: int, norms: Norms, activation: str
) -> tuple[PerLayerEmbedding, list[Block]]:
    """Gemma's per-layer embeddings: the table, and the block that each layer ends with."""
    (table, projection), layers = per_layer_tensors(prefix, shape, vocab, width)
    norm = norms.of_heads(width)(f"{prefix}per_layer_projection_norm")
    blocks = [
        Block(
            PerLayerInput(layer, Projection.of([gate]), Projection.of([out]), activation),
            after=norms(f"{prefix}layers.{layer}.post_per_layer_input_norm"),
        )
        for layer, (gate, out) in enumerate(layers)
    ]
    return PerLayerEmbedding(table, Projection.of([projection]), norm, width), blocks


def decoder(
    prefix: str,
    shape: Shape,
    layers: Iterable[Layer | tuple[Block, ...]],
    norm: Norm,
    *,
    head: str = "lm_head.weight",
    **rest: Any,
) -> Decoder:
    """A decoder whose tensors begin with `prefix`; the LM head is called `head` unless it is the embedding.

    `rest` are the other fields of a `Decoder`: multipliers, soft-cap, per-layer embeddings.
    """
    table, *heads = embeddings(prefix, shape, head=head)
    described = tuple(layer if isinstance(layer, Layer) else Layer(layer) for layer in layers)
    return Decoder(table, described, norm, Projection.of(heads) if heads else None, **rest)


def described_spec(
    config: Config,
    text: Config,
    shape: Shape,
    *,
    name: str,
    family: str,
    decoder: Decoder,
    towers: Tensors = (),
    notes: Iterable[str] = (),
    planned_only: str = "",
) -> ModelSpec:
    """The spec of a model that runs, unless `planned_only` says why not: its blocks name caches and tensors."""
    shared = [replace(a.cache, layer=a.layer) for a in decoder.attentions if not a.owns_kv]
    return model_spec(
        config,
        text,
        shape,
        name=name,
        family=family,
        widest_mlp=decoder.widest_mlp,
        caches=decoder.caches,
        tensors=[*tensors_of(decoder).values(), *towers],
        shared_caches=shared,
        decoder=None if planned_only else decoder,
        notes=notes,
        planned_only=planned_only,
    )
