"""Gemma 3: five sliding layers to a full one, normed queries and keys, and SigLIP in front of the larger models."""

from __future__ import annotations

from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config, every
from windowpane.models.families import towers
from windowpane.models.parts import FULL, SLIDING, causal_only, read_shape, retention
from windowpane.models.rope import read_ropes
from windowpane.models.spec import ModelSpec

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
DEFAULT_WINDOW = 4096
THETAS = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}


def read(config: Config, name: str) -> ModelSpec:
    nested = config.has("text_config")
    text = config.section("text_config") if nested else config
    causal_only(text)
    shape = read_shape(config, text, tied=True, defaults=DEFAULTS)
    interval, dim = text.integer("sliding_window_pattern", 6), shape.head_dim
    kinds = text.layer_types(shape.layers, (FULL, SLIDING), every(interval, FULL, SLIDING, shape.layers))
    ropes = read_ropes(text, dim, shape.max_position, THETAS)
    norms = Norms(shape.hidden, text.number("rms_norm_eps", 1e-6), adds_one=True)
    width, activation = text.integer("intermediate_size"), text.text("hidden_activation") or "gelu_pytorch_tanh"
    wrapper = "language_model." if nested else ""
    layers = []
    for layer, kind in enumerate(kinds):
        prefix = f"{wrapper}model.layers.{layer}."
        mixer = attention(
            f"{prefix}self_attn.",
            shape,
            shape.cache(layer, retention(kind, text, DEFAULT_WINDOW)),
            rope=ropes[kind],
            scale=text.number("query_pre_attn_scalar", 256) ** -0.5,
            softcap=text.optional_number("attn_logit_softcapping"),
            bias=text.flag("attention_bias", False),
            head_norms=norms.of_heads(dim),
        )
        layers.append(norms.both(prefix, mixer, gated_mlp(f"{prefix}mlp.", shape, width, activation)))
    described = decoder(
        f"{wrapper}model.",
        shape,
        layers,
        norms(f"{wrapper}model.norm"),
        head=f"{wrapper}lm_head.weight",
        embedding_multiplier=shape.hidden**0.5,
        logit_softcap=text.optional_number("final_logit_softcapping"),
    )
    vision = towers.gemma3(config, shape.hidden) if nested and config.has("vision_config") else ()
    return described_spec(config, text, shape, name=name, family="gemma3", decoder=described, towers=vision)
