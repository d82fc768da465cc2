"""Command R7B and its kin: three sliding layers to a full one (without rotary positions), attention beside the MLP."""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.models.config import Config, every
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

ARCHITECTURES = ("Cohere2ForCausalLM",)
DEFAULT_WINDOW = 4096


def read(config: Config, name: str) -> ModelSpec:
    defaults = {"head_dim": even_head_dim(config), "num_key_value_heads": config.integer("num_attention_heads")}
    shape = read_shape(config, config, tied=True, defaults=defaults)
    interval = config.integer("sliding_window_pattern", 4)
    kinds = config.layer_types(shape.layers, (FULL, SLIDING), every(interval, FULL, SLIDING, shape.layers))
    width = config.integer("intermediate_size")
    bias = config.flag("attention_bias", False)
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        keeps = retention(kind, config, DEFAULT_WINDOW)
        caches.append(TokenCache(layer, keeps, shape.kv_heads, shape.head_dim, shape.head_dim))
        tensors += attention(f"{prefix}self_attn.", shape, bias=bias)
        tensors += mlp(f"{prefix}mlp.", shape.hidden, width)
        # One norm feeds both: they run side by side.
        tensors += norms(prefix, ("input_layernorm",), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    return model_spec(
        config, config, shape, name=name, family="cohere2", widest_mlp=width, caches=caches, tensors=tensors
    )
