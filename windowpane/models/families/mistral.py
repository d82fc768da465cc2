"""Mistral, Ministral and Mistral Small: Llama's layers, with one sliding window for all layers or none."""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config
from windowpane.models.parts import FULL, SLIDING, even_head_dim, read_shape, retention
from windowpane.models.rope import read_rope
from windowpane.models.spec import ModelSpec

ARCHITECTURES = ("MistralForCausalLM", "MinistralForCausalLM")
DEFAULT_WINDOW = 4096


def read(config: Config, name: str) -> ModelSpec:
    shape = read_shape(config, config, tied=False, defaults={"head_dim": even_head_dim(config)})
    # A null window means that every layer is full; the class's own default is a window.
    uniform = SLIDING if config.fields.get("sliding_window", DEFAULT_WINDOW) is not None else FULL
    kinds = config.layer_types(shape.layers, (FULL, SLIDING), (uniform,) * shape.layers)
    rope = read_rope(config, shape.head_dim, shape.max_position)
    norms = Norms(shape.hidden, config.number("rms_norm_eps", 1e-6))
    width, activation = config.integer("intermediate_size"), config.text("hidden_act") or "silu"
    layers = []
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        keeps = retention(kind, config, DEFAULT_WINDOW)
        cache = TokenCache(layer, keeps, shape.kv_heads, shape.head_dim, shape.head_dim)
        mixer = attention(f"{prefix}self_attn.", shape, cache, rope=rope)
        layers.append(norms.pre(prefix, mixer, gated_mlp(f"{prefix}mlp.", shape, width, activation)))
    described = decoder("model.", shape, layers, norms("model.norm"))
    return described_spec(config, config, shape, name=name, family="mistral", decoder=described)
