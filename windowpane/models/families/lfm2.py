"""LFM2, dense and with experts: short convolutions, whose state is a few inputs, with full layers among them."""

from __future__ import annotations

from dataclasses import replace

from windowpane.kv.caches import StateCache, StatePart
from windowpane.kv.retention import Full, ceil_div
from windowpane.models.blocks import SIGMOID, Attention, Block, Experts, Mixer, Projection, Router, ShortConv
from windowpane.models.building import Norms, attention, decoder, described_spec, experts, gated_mlp
from windowpane.models.config import LARGEST_SIZE, Config, ModelError
from windowpane.models.parts import (
    FULL,
    Shape,
    by_columns,
    by_rows,
    even_head_dim,
    experts_per_token,
    mlp_tensors,
    read_shape,
    separate_experts,
    whole,
    with_biases,
)
from windowpane.models.rope import Rope, read_rope
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

WITH_EXPERTS = "Lfm2MoeForCausalLM"
ARCHITECTURES = ("Lfm2ForCausalLM", WITH_EXPERTS)

CONV = "conv"
NAMES = ("w1", "w3", "w2")  # gate, up and down


def read(config: Config, name: str) -> ModelSpec:
    has_experts = config.texts("architectures") == (WITH_EXPERTS,)
    shape = read_shape(config, config, tied=True, defaults={"head_dim": even_head_dim(config)})
    if config.has("tie_embedding"):  # wins over tie_word_embeddings, as in transformers
        shape = replace(shape, tied=config.flag("tie_embedding", True))
    full = config.integers("full_attn_idxs")
    rule = (FULL if full is None or layer in full else CONV for layer in range(shape.layers))
    kinds = config.layer_types(shape.layers, (FULL, CONV), rule)
    kernel = config.integer("conv_L_cache", 3, minimum=2)
    width = config.integer("intermediate_size") if has_experts else _mlp_width(config)
    dense_layers = config.integer("num_dense_layers", 2, minimum=0) if has_experts else shape.layers
    norms = Norms(shape.hidden, config.number("norm_eps", 1e-5))
    rope = read_rope(config, shape.head_dim, shape.max_position, theta=1e6)
    layers = []
    for layer, kind in enumerate(kinds):
        at = f"model.layers.{layer}."
        if kind == FULL:
            mixer: Mixer = _attention(f"{at}self_attn.", shape, layer, rope, norms.of_heads(shape.head_dim))
        else:
            mixer = _convolution(f"{at}conv.", shape.hidden, layer, kernel, config.flag("conv_bias", False))
        if layer < dense_layers:
            tensors = mlp_tensors(f"{at}feed_forward.", shape.hidden, width, names=NAMES)
            mlp: Mixer = gated_mlp("", shape, width, "silu", tensors=tensors)
        else:
            mlp = _experts(f"{at}feed_forward.", config, shape.hidden, layer)
        layers.append((Block(mixer, before=norms(f"{at}operator_norm")), Block(mlp, before=norms(f"{at}ffn_norm"))))
    described = decoder("model.", shape, layers, norms("model.embedding_norm"))
    return described_spec(config, config, shape, name=name, family="lfm2", decoder=described)


def _experts(prefix: str, config: Config, hidden: int, layer: int) -> Experts:
    count, width = config.integer("num_experts"), config.integer("moe_intermediate_size")
    router = Router(
        whole(f"{prefix}gate.weight", count, hidden),
        experts_per_token(config, count),
        scoring=SIGMOID,
        correction=whole(f"{prefix}expert_bias", count) if config.flag("use_expert_bias", True) else None,
        renormalizes=config.flag("norm_topk_prob", True),
        multiplier=config.number("routed_scaling_factor", 1.0),
    )
    tensors = separate_experts(f"{prefix}experts.", count, hidden, width, names=NAMES)
    return experts(layer, router, tensors, "silu")


def _mlp_width(config: Config) -> int:
    """The config gives the width of an MLP without a gate; with one, two thirds of it, rounded up."""
    width = config.integer("block_ff_dim") if config.has("block_ff_dim") else config.integer("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    factor, multiple = config.number("block_ffn_dim_multiplier", 1.0), config.integer("block_multiple_of", 256)
    scaled = int(factor * int(2 * width / 3))
    if not 1 <= scaled <= LARGEST_SIZE:
        raise ModelError(
            f"an intermediate size of {width} and block_ffn_dim_multiplier {factor:g} make MLPs {scaled!r:.40} wide; "
            f"a width must be from 1 to {LARGEST_SIZE:,}"
        )
    return ceil_div(scaled, multiple) * multiple


def _attention(prefix: str, shape: Shape, layer: int, rope: Rope, head_norms: Norms) -> Attention:
    queries, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = [
        by_rows(f"{prefix}q_proj.weight", queries, shape.hidden, shape.query_heads, "attention"),
        by_rows(f"{prefix}k_proj.weight", kv, shape.hidden, shape.kv_heads, "attention"),
        by_rows(f"{prefix}v_proj.weight", kv, shape.hidden, shape.kv_heads, "attention"),
        by_columns(f"{prefix}out_proj.weight", shape.hidden, queries, shape.query_heads, "attention"),
    ]
    mixer = attention(prefix, shape, shape.cache(layer, Full()), rope=rope, tensors=tensors)
    return replace(mixer, q_norm=head_norms(f"{prefix}q_layernorm"), k_norm=head_norms(f"{prefix}k_layernorm"))


def _convolution(prefix: str, hidden: int, layer: int, kernel: int, bias: bool) -> ShortConv:
    channels = Shard(0, ((hidden, hidden),))
    thirds = Shard(0, ((hidden, hidden),) * 3)  # two gates and the input
    inputs = [TensorSpec(f"{prefix}in_proj.weight", (3 * hidden, hidden), thirds, linear=True, part="state")]
    out = [by_columns(f"{prefix}out_proj.weight", hidden, hidden, hidden, "state")]
    return ShortConv(
        layer,
        # A kernel of n needs n - 1 earlier inputs; transformers' own cache has room for n.
        StateCache(layer, (StatePart("conv", hidden, kernel - 1),)),
        Projection.of(with_biases(inputs) if bias else inputs),
        conv=TensorSpec(f"{prefix}conv.weight", (hidden, 1, kernel), channels, part="state"),
        conv_bias=TensorSpec(f"{prefix}conv.bias", (hidden,), channels, part="state") if bias else None,
        out=Projection.of(with_biases(out) if bias else out),
    )
