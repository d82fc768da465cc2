"""Phi-3 and Phi-4: Llama's layers with q, k and v in one projection, and gate and up in another."""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.models.config import Config
from windowpane.models.parts import (
    FULL,
    SLIDING,
    Shape,
    by_columns,
    embeddings,
    even_head_dim,
    fused_mlp,
    model_spec,
    norms,
    read_shape,
    retention,
)
from windowpane.models.spec import ModelSpec, Shard, TensorSpec

ARCHITECTURES = ("Phi3ForCausalLM",)


def read(config: Config, name: str) -> ModelSpec:
    defaults = {"head_dim": even_head_dim(config), "num_key_value_heads": config.integer("num_attention_heads")}
    shape = read_shape(config, config, tied=False, defaults=defaults)
    keeps = retention(SLIDING if config.has("sliding_window") else FULL, config)
    width = config.integer("intermediate_size")
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        caches.append(TokenCache(layer, keeps, shape.kv_heads, shape.head_dim, shape.head_dim))
        tensors += _attention(f"{prefix}self_attn.", shape)
        tensors += fused_mlp(f"{prefix}mlp.", shape.hidden, width)
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    return model_spec(config, config, shape, name=name, family="phi3", widest_mlp=width, caches=caches, tensors=tensors)


def _attention(prefix: str, shape: Shape) -> list[TensorSpec]:
    query, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sections = ((query, shape.query_heads), (kv, shape.kv_heads), (kv, shape.kv_heads))
    return [
        TensorSpec(
            f"{prefix}qkv_proj.weight",
            (query + 2 * kv, shape.hidden),
            Shard(0, sections),
            linear=True,
            part="attention",
        ),
        by_columns(f"{prefix}o_proj.weight", shape.hidden, query, shape.query_heads, "attention"),
    ]
