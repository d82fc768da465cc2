"""Llama 3, SmolLM2 (the same architecture) and SmolLM3 (the same layers, some without rotary positions)."""

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

ARCHITECTURES = ("LlamaForCausalLM", "SmolLM3ForCausalLM")


def read(config: Config, name: str) -> ModelSpec:
    smollm3 = config.texts("architectures") == ("SmolLM3ForCausalLM",)
    defaults = {"head_dim": even_head_dim(config)}
    if not smollm3:
        defaults["num_key_value_heads"] = config.integer("num_attention_heads")
    shape = read_shape(config, config, tied=smollm3, defaults=defaults)
    kinds = _smollm3_kinds(config, shape.layers) if smollm3 else (FULL,) * shape.layers
    width = config.integer("intermediate_size")
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        caches.append(TokenCache(layer, retention(kind, config), shape.kv_heads, shape.head_dim, shape.head_dim))
        tensors += attention(f"{prefix}self_attn.", shape, bias=attention_bias)
        tensors += mlp(f"{prefix}mlp.", shape.hidden, width, bias=mlp_bias)
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    return model_spec(
        config, config, shape, name=name, family="llama", widest_mlp=width, caches=caches, tensors=tensors
    )


def _smollm3_kinds(config: Config, layers: int) -> tuple[str, ...]:
    """Before `layer_types`, sliding windows were on the layers without rotary positions."""
    interval = config.integer("no_rope_layer_interval", 4)
    has_rope = config.integers("no_rope_layers", layers) or [int((i + 1) % interval != 0) for i in range(layers)]
    slides = config.flag("use_sliding_window", False) and config.has("sliding_window")
    rule = (SLIDING if slides and not rope else FULL for rope in has_rope)
    return config.layer_types(layers, (FULL, SLIDING), rule)
