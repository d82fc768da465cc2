"""Phi-3 and Phi-4: Llama's layers with q, k and v in one projection, and gate and up in another."""

from __future__ import annotations

from dataclasses import replace

from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config, ModelError
from windowpane.models.parts import (
    FULL,
    SLIDING,
    Shape,
    by_columns,
    even_head_dim,
    fused_mlp_tensors,
    read_shape,
    retention,
)
from windowpane.models.rope import DEFAULT, LONG, YARN, Rope, read_rope
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = ("Phi3ForCausalLM",)


def read(config: Config, name: str) -> ModelSpec:
    defaults = {"head_dim": even_head_dim(config), "num_key_value_heads": config.integer("num_attention_heads")}
    shape = read_shape(config, config, tied=False, defaults=defaults)
    keeps = retention(SLIDING if config.has("sliding_window") else FULL, config)
    norms = Norms(shape.hidden, config.number("rms_norm_eps", 1e-5))
    rope, width = _rope(config, shape), config.integer("intermediate_size")
    layers = []
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        tensors = _attention_tensors(f"{prefix}self_attn.", shape)
        mixer = attention(f"{prefix}self_attn.", shape, shape.cache(layer, keeps), rope=rope, tensors=tensors)
        fused = fused_mlp_tensors(f"{prefix}mlp.", shape.hidden, width)
        mlp = gated_mlp(f"{prefix}mlp.", shape, width, config.text("hidden_act") or "silu", tensors=fused)
        layers.append(norms.pre(prefix, mixer, mlp))
    described = decoder("model.", shape, layers, norms("model.norm"))
    return described_spec(config, config, shape, name=name, family="phi3", decoder=described)


def _rope(config: Config, shape: Shape) -> Rope:
    """Long rope under three names; its factors are one per rotated pair."""
    rope = read_rope(config, shape.head_dim, FULL, Rope(DEFAULT, shape.head_dim))
    if rope.kind in ("su", YARN):
        rope = replace(rope, kind=LONG)
    if rope.kind == LONG:
        for which, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
            if len(factors) != rope.rotary_dim // 2:
                raise ModelError(f"rope_scaling.{which} has {len(factors)} factors for {rope.rotary_dim // 2} pairs")
    return rope


def _attention_tensors(prefix: str, shape: Shape) -> list[TensorSpec]:
    query, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sections = Shard(0, ((query, shape.query_heads), (kv, shape.kv_heads), (kv, shape.kv_heads)))
    fused = (query + 2 * kv, shape.hidden)
    return [
        TensorSpec(f"{prefix}qkv_proj.weight", fused, sections, linear=True, part="attention"),
        by_columns(f"{prefix}o_proj.weight", shape.hidden, query, shape.query_heads, "attention"),
    ]
