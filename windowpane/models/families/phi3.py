"""Phi-3 and Phi-4: Llama's layers with q, k and v in one projection, and gate and up in another."""

from __future__ import annotations

from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config
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
from windowpane.models.rope import DEFAULT, LONG, YARN, Rope, kind_of, one_section, rope_of
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = ("Phi3ForCausalLM",)
DEFAULT_ORIGINAL_POSITIONS = 4096


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
    """Long rope under three names, or none; the config class has an original length of its own."""
    section = one_section(config, shape.max_position, theta=1e4, original=DEFAULT_ORIGINAL_POSITIONS)
    kind = kind_of(section)
    if kind in ("su", YARN):
        section = Config({**section.fields, "rope_type": LONG}, section.where)
    elif kind not in (DEFAULT, LONG):
        raise section.unknown_value("rope_type", kind, (DEFAULT, LONG))
    return rope_of(section, shape.head_dim, shape.max_position, part_of_head=True)


def _attention_tensors(prefix: str, shape: Shape) -> list[TensorSpec]:
    query, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sections = Shard(0, ((query, shape.query_heads), (kv, shape.kv_heads), (kv, shape.kv_heads)))
    fused = (query + 2 * kv, shape.hidden)
    return [
        TensorSpec(f"{prefix}qkv_proj.weight", fused, sections, linear=True, part="attention"),
        by_columns(f"{prefix}o_proj.weight", shape.hidden, query, shape.query_heads, "attention"),
    ]
