"""Gemma 2: sliding and full layers in turn, norms before and after each block."""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.models.config import Config, every
from windowpane.models.parts import (
    FULL,
    SANDWICH_NORMS,
    SLIDING,
    attention,
    causal_only,
    embeddings,
    mlp,
    model_spec,
    norms,
    read_shape,
    retention,
)
from windowpane.models.spec import ModelSpec, TensorSpec

ARCHITECTURES = ("Gemma2ForCausalLM",)


def read(config: Config, name: str) -> ModelSpec:
    causal_only(config)
    shape = read_shape(config, config, tied=True)
    kinds = config.layer_types(shape.layers, (FULL, SLIDING), every(2, FULL, SLIDING, shape.layers))
    width = config.integer("intermediate_size")
    bias = config.flag("attention_bias", False)
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        caches.append(TokenCache(layer, retention(kind, config), shape.kv_heads, shape.head_dim, shape.head_dim))
        tensors += attention(f"{prefix}self_attn.", shape, bias=bias)
        tensors += mlp(f"{prefix}mlp.", shape.hidden, width)
        tensors += norms(prefix, SANDWICH_NORMS, shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    return model_spec(
        config, config, shape, name=name, family="gemma2", widest_mlp=width, caches=caches, tensors=tensors
    )
