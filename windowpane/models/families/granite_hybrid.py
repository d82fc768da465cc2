"""Granite 4 H: Mamba-2 layers with a few full ones, and experts beside a shared MLP on every layer."""

from __future__ import annotations

from windowpane.kv.caches import StateCache, TokenCache
from windowpane.kv.retention import Full
from windowpane.models.config import Config
from windowpane.models.families.mamba import read_mamba_d
from windowpane.models.parts import (
    FULL,
    LINEAR,
    attention_tensors,
    embeddings,
    even_head_dim,
    experts_per_token,
    fused_mlp_tensors,
    model_spec,
    norms,
    read_shape,
    whole,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)

KINDS = {"mamba": LINEAR, "attention": FULL, LINEAR: LINEAR, FULL: FULL}


def read(config: Config, name: str) -> ModelSpec:
    defaults = {"head_dim": even_head_dim(config), "num_key_value_heads": config.integer("num_attention_heads")}
    shape = read_shape(config, config, tied=False, defaults=defaults)
    kinds = config.layer_types(shape.layers, KINDS, (LINEAR,) * shape.layers)
    mamba = read_mamba_d(config, config.integer("mamba_expand", 2) * shape.hidden)
    experts, width = config.integer("num_local_experts", minimum=0), config.integer("intermediate_size")
    shared = config.integer("shared_intermediate_size")
    bias, conv_bias = config.flag("mamba_proj_bias", False), config.flag("mamba_conv_bias", True)
    caches: list[TokenCache | StateCache] = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        if KINDS[kind] == FULL:
            caches.append(shape.cache(layer, Full()))
            tensors += attention_tensors(f"{prefix}self_attn.", shape, bias=config.flag("attention_bias", False))
        else:
            caches.append(mamba.cache(layer))
            tensors += mamba.tensors(f"{prefix}mamba.", shape.hidden, in_bias=bias, out_bias=bias, conv_bias=conv_bias)
        if experts:
            tensors += _experts(f"{prefix}block_sparse_moe.", experts, shape.hidden, width)
        tensors += fused_mlp_tensors(
            f"{prefix}shared_mlp.", shape.hidden, shared, names=("input_linear", "output_linear")
        )
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="granite_hybrid",
        widest_mlp=shared + (experts_per_token(config, experts) * width if experts else 0),
        caches=caches,
        tensors=tensors,
    )


def _experts(prefix: str, experts: int, hidden: int, width: int) -> list[TensorSpec]:
    shard = Shard(0, ((experts, experts),))
    return [
        whole(f"{prefix}router.layer.weight", experts, hidden),
        TensorSpec(f"{prefix}input_linear.weight", (experts, 2 * width, hidden), shard, linear=True, part="experts"),
        TensorSpec(f"{prefix}output_linear.weight", (experts, hidden, width), shard, linear=True, part="experts"),
    ]
