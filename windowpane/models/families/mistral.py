"""Mistral, Ministral and Mistral Small: Llama's layers, with one sliding window for all layers or none."""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.models.config import Config
from windowpane.models.parts import (
    FULL,
    SLIDING,
    attention,
    embeddings,
    even_head_dim,
    mlp,
    model_spec,
    norms,
    read_shape,
    retention,
)
from windowpane.models.spec import ModelSpec, TensorSpec

ARCHITECTURES = ("MistralForCausalLM", "MinistralForCausalLM")
DEFAULT_WINDOW = 4096


def read(config: Config, name: str) -> ModelSpec:
    shape = read_shape(config, config, tied=False, defaults={"head_dim": even_head_dim(config)})
    # A null window means that every layer is full; the class's own default is a window.
    uniform = SLIDING if config.fields.get("sliding_window", DEFAULT_WINDOW) is not None else FULL
    kinds = config.layer_types(shape.layers, (FULL, SLIDING), (uniform,) * shape.layers)
    width = config.integer("intermediate_size")
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        keeps = retention(kind, config, DEFAULT_WINDOW)
        caches.append(TokenCache(layer, keeps, shape.kv_heads, shape.head_dim, shape.head_dim))
        tensors += attention(f"{prefix}self_attn.", shape)
        tensors += mlp(f"{prefix}mlp.", shape.hidden, width)
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    return model_spec(
        config, config, shape, name=name, family="mistral", widest_mlp=width, caches=caches, tensors=tensors
    )
