"""Gemma 3: five sliding layers to a full one, normed queries and keys, and SigLIP in front of the larger models."""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.models.config import Config, every
from windowpane.models.families import towers
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

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
DEFAULT_WINDOW = 4096


def read(config: Config, name: str) -> ModelSpec:
    nested = config.has("text_config")
    text = config.section("text_config") if nested else config
    causal_only(text)
    shape = read_shape(config, text, tied=True, defaults=DEFAULTS)
    kinds = layer_kinds(text, shape.layers)
    width = text.integer("intermediate_size")
    bias = text.flag("attention_bias", False)
    wrapper = "language_model." if nested else ""
    caches = []
    tensors: list[TensorSpec] = embeddings(f"{wrapper}model.", shape, head=f"{wrapper}lm_head.weight")
    for layer, kind in enumerate(kinds):
        prefix = f"{wrapper}model.layers.{layer}."
        keeps = retention(kind, text, DEFAULT_WINDOW)
        caches.append(TokenCache(layer, keeps, shape.kv_heads, shape.head_dim, shape.head_dim))
        tensors += attention(f"{prefix}self_attn.", shape, bias=bias, qk_norm=True)
        tensors += mlp(f"{prefix}mlp.", shape.hidden, width)
        tensors += norms(prefix, SANDWICH_NORMS, shape.hidden)
    tensors += norms(f"{wrapper}model.", ("norm",), shape.hidden)
    if nested and config.has("vision_config"):
        tensors += towers.gemma3(config, shape.hidden)
    return model_spec(config, text, shape, name=name, family="gemma3", widest_mlp=width, caches=caches, tensors=tensors)


def layer_kinds(text: Config, layers: int) -> tuple[str, ...]:
    interval = text.integer("sliding_window_pattern", 6)
    return text.layer_types(layers, (FULL, SLIDING), every(interval, FULL, SLIDING, layers))
