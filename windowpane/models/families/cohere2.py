"""Command R7B and its kin: three sliding layers to a full one (without rotary positions), attention beside the MLP."""

from __future__ import annotations

from windowpane.models.blocks import LAYER, Block, Sum
from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config, every
from windowpane.models.parts import FULL, SLIDING, even_head_dim, read_shape, retention
from windowpane.models.rope import read_rope
from windowpane.models.spec import ModelSpec

ARCHITECTURES = ("Cohere2ForCausalLM",)
DEFAULT_WINDOW = 4096


def read(config: Config, name: str) -> ModelSpec:
    defaults = {"head_dim": even_head_dim(config), "num_key_value_heads": config.integer("num_attention_heads")}
    shape = read_shape(config, config, tied=True, defaults=defaults)
    interval, dim = config.integer("sliding_window_pattern", 4), shape.head_dim
    kinds = config.layer_types(shape.layers, (FULL, SLIDING), every(interval, FULL, SLIDING, shape.layers))
    rope = read_rope(config, dim, shape.max_position).with_interleaved_pairs()
    norms = Norms(shape.hidden, config.number("layer_norm_eps", 1e-5), kind=LAYER)
    width, activation = config.integer("intermediate_size"), config.text("hidden_act") or "silu"
    layers = []
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        mixer = attention(
            f"{prefix}self_attn.",
            shape,
            shape.cache(layer, retention(kind, config, DEFAULT_WINDOW)),
            rope=rope if kind == SLIDING else None,
            bias=config.flag("attention_bias", False),
        )
        # One norm feeds both: they run side by side.
        branches = Block(mixer), Block(gated_mlp(f"{prefix}mlp.", shape, width, activation))
        layers.append((Block(Sum(branches), before=norms(f"{prefix}input_layernorm")),))
    described = decoder(
        "model.", shape, layers, norms("model.norm"), logit_multiplier=config.number("logit_scale", 0.0625)
    )
    return described_spec(config, config, shape, name=name, family="cohere2", decoder=described)
