"""LFM2, dense and with experts: short convolutions, whose state is a few inputs, with full layers among them."""

from __future__ import annotations

from windowpane.kv.caches import StateCache, StatePart, TokenCache
from windowpane.kv.retention import Full, ceil_div
from windowpane.models.config import Config
from windowpane.models.parts import (
    FULL,
    Shape,
    by_columns,
    by_rows,
    embeddings,
    even_head_dim,
    experts_per_token,
    mlp_tensors,
    model_spec,
    norms,
    read_shape,
    separate_experts,
    whole,
    with_biases,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

WITH_EXPERTS = "Lfm2MoeForCausalLM"
ARCHITECTURES = ("Lfm2ForCausalLM", WITH_EXPERTS)

CONV = "conv"


def read(config: Config, name: str) -> ModelSpec:
    has_experts = config.texts("architectures") == (WITH_EXPERTS,)
    tied = config.flag("tie_embedding", True)
    shape = read_shape(config, config, tied=tied, defaults={"head_dim": even_head_dim(config)})
    full = config.integers("full_attn_idxs")
    rule = (FULL if full is None or layer in full else CONV for layer in range(shape.layers))
    kinds = config.layer_types(shape.layers, (FULL, CONV), rule)
    kernel = config.integer("conv_L_cache", 3, minimum=2)
    bias = config.flag("conv_bias", False)
    width = config.integer("intermediate_size") if has_experts else _mlp_width(config)
    dense_layers = config.integer("num_dense_layers", 2, minimum=0) if has_experts else shape.layers
    caches: list[TokenCache | StateCache] = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        if kind == FULL:
            caches.append(shape.cache(layer, Full()))
            tensors += _attention(f"{prefix}self_attn.", shape)
        else:
            # A kernel of n needs n - 1 earlier inputs; transformers' own cache has room for n.
            caches.append(StateCache(layer, (StatePart("conv", shape.hidden, kernel - 1),)))
            tensors += _convolution(f"{prefix}conv.", shape.hidden, kernel, bias)
        if layer < dense_layers:
            tensors += mlp_tensors(f"{prefix}feed_forward.", shape.hidden, width, names=("w1", "w3", "w2"))
        else:
            tensors += _experts(f"{prefix}feed_forward.", config, shape.hidden)
        tensors += norms(prefix, ("operator_norm", "ffn_norm"), shape.hidden)
    tensors += norms("model.", ("embedding_norm",), shape.hidden)
    widest = max(width if dense_layers else 0, _routed_width(config) if has_experts else 0)
    return model_spec(
        config, config, shape, name=name, family="lfm2", widest_mlp=widest, caches=caches, tensors=tensors
    )


def _routed_width(config: Config) -> int:
    return experts_per_token(config, config.integer("num_experts")) * config.integer("moe_intermediate_size")


def _experts(prefix: str, config: Config, hidden: int) -> list[TensorSpec]:
    experts, width = config.integer("num_experts"), config.integer("moe_intermediate_size")
    bias = [whole(f"{prefix}expert_bias", experts)] if config.flag("use_expert_bias", True) else []
    return [
        whole(f"{prefix}gate.weight", experts, hidden),
        *bias,
        *separate_experts(f"{prefix}experts.", experts, hidden, width, names=("w1", "w3", "w2")),
    ]


def _mlp_width(config: Config) -> int:
    """The config gives the width of an MLP without a gate; with one, two thirds of it, rounded up."""
    width = config.integer("block_ff_dim") if config.has("block_ff_dim") else config.integer("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    multiple = config.integer("block_multiple_of", 256)
    return ceil_div(int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3)), multiple) * multiple


def _attention(prefix: str, shape: Shape) -> list[TensorSpec]:
    queries, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return [
        by_rows(f"{prefix}q_proj.weight", queries, shape.hidden, shape.query_heads, "attention"),
        by_rows(f"{prefix}k_proj.weight", kv, shape.hidden, shape.kv_heads, "attention"),
        by_rows(f"{prefix}v_proj.weight", kv, shape.hidden, shape.kv_heads, "attention"),
        by_columns(f"{prefix}out_proj.weight", shape.hidden, queries, shape.query_heads, "attention"),
        *norms(prefix, ("q_layernorm", "k_layernorm"), shape.head_dim),
    ]


def _convolution(prefix: str, hidden: int, kernel: int, bias: bool) -> list[TensorSpec]:
    channels = Shard(0, ((hidden, hidden),))
    thirds = Shard(0, ((hidden, hidden),) * 3)  # two gates and the input
    projections = [
        TensorSpec(f"{prefix}in_proj.weight", (3 * hidden, hidden), thirds, linear=True, part="state"),
        by_columns(f"{prefix}out_proj.weight", hidden, hidden, hidden, "state"),
    ]
    tensors = with_biases(projections) if bias else projections
    tensors.append(TensorSpec(f"{prefix}conv.weight", (hidden, 1, kernel), channels, part="state"))
    if bias:
        tensors.append(TensorSpec(f"{prefix}conv.bias", (hidden,), channels, part="state"))
    return tensors
