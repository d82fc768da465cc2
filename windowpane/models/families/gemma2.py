"""Gemma 2: sliding and full layers in turn, norms before and after each block, soft-capped scores."""

from __future__ import annotations

from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config, every
from windowpane.models.parts import FULL, SLIDING, causal_only, read_shape, retention
from windowpane.models.rope import read_rope
from windowpane.models.spec import ModelSpec

ARCHITECTURES = ("Gemma2ForCausalLM",)


def read(config: Config, name: str) -> ModelSpec:
    causal_only(config)
    shape = read_shape(config, config, tied=True)
    kinds = config.layer_types(shape.layers, (FULL, SLIDING), every(2, FULL, SLIDING, shape.layers))
    rope = read_rope(config, shape.head_dim, shape.max_position)
    norms = Norms(shape.hidden, config.number("rms_norm_eps", 1e-6), adds_one=True)
    width, activation = config.integer("intermediate_size"), config.text("hidden_activation") or "gelu_pytorch_tanh"
    layers = []
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        mixer = attention(
            f"{prefix}self_attn.",
            shape,
            shape.cache(layer, retention(kind, config)),
            rope=rope,
            scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
            softcap=config.optional_number("attn_logit_softcapping", 50.0),
            bias=config.flag("attention_bias", False),
        )
        layers.append(norms.both(prefix, mixer, gated_mlp(f"{prefix}mlp.", shape, width, activation)))
    described = decoder(
        "model.",
        shape,
        layers,
        norms("model.norm"),
        embedding_multiplier=shape.hidden**0.5,
        logit_softcap=config.optional_number("final_logit_softcapping", 30.0),
    )
    return described_spec(config, config, shape, name=name, family="gemma2", decoder=described)
