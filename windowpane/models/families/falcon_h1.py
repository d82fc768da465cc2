"""Falcon-H1: full attention and Mamba-2 side by side in every layer, so a layer keeps both tokens and a state.

Every branch has multipliers of its inputs and outputs. Where a projection has no bias, those of attention's inputs
become part of the scale and of the output's multiplier, and those of Mamba's inputs part of its own.
"""

from __future__ import annotations

from dataclasses import replace

from windowpane.kv.retention import Full
from windowpane.models.blocks import Block, Sum
from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config
from windowpane.models.families.mamba import Mamba, read_dt_limits, read_mamba_d
from windowpane.models.parts import Shape, activation_problem, even_head_dim, read_shape
from windowpane.models.rope import Rope, read_rope
from windowpane.models.spec import ModelSpec

ARCHITECTURES = ("FalconH1ForCausalLM",)


def read(config: Config, name: str) -> ModelSpec:
    shape = read_shape(config, config, tied=False, defaults={"head_dim": even_head_dim(config)})
    # Some releases expand by half a width, beside the whole number that it comes to.
    has_inner = config.has("mamba_d_ssm")
    inner = config.integer("mamba_d_ssm") if has_inner else config.integer("mamba_expand", 2) * shape.hidden
    mamba = read_mamba_d(config, inner)
    norms = Norms(shape.hidden, config.number("rms_norm_eps", 1e-5))
    rope = read_rope(config, shape.head_dim, shape.max_position)
    width, activation = config.integer("intermediate_size"), config.text("hidden_act") or "silu"
    gate_multiplier, down_multiplier = config.numbers("mlp_multipliers", 2) or (1.0, 1.0)
    layers = []
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        both = Sum((_attention(config, at, shape, layer, rope), _mamba(config, at, shape, layer, mamba, norms.eps)))
        mlp = gated_mlp(f"{at}feed_forward.", shape, width, activation, bias=config.flag("mlp_bias", False))
        mlp = replace(mlp, gate_multiplier=gate_multiplier)
        layers.append(
            (
                Block(both, before=norms(f"{at}input_layernorm")),
                Block(mlp, before=norms(f"{at}pre_ff_layernorm"), multiplier=down_multiplier),
            )
        )
    described = decoder(
        "model.",
        shape,
        layers,
        norms("model.final_layernorm"),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logit_multiplier=config.number("lm_head_multiplier", 1.0),
    )
    return described_spec(
        config, config, shape, name=name, family="falcon_h1", decoder=described, planned_only=_problem(config)
    )


def _attention(config: Config, at: str, shape: Shape, layer: int, rope: Rope) -> Block:
    inputs = config.number("attention_in_multiplier", 1.0)
    mixer = attention(
        f"{at}self_attn.",
        shape,
        shape.cache(layer, Full()),
        rope=rope,
        scale=shape.head_dim**-0.5 * inputs**2 * config.number("key_multiplier", 1.0),
        bias=config.flag("attention_bias", False),
    )
    return Block(mixer, multiplier=inputs * config.number("attention_out_multiplier", 1.0))


def _mamba(config: Config, at: str, shape: Shape, layer: int, mamba: Mamba, eps: float) -> Block:
    inputs = config.number("ssm_in_multiplier", 1.0)
    sections = config.numbers("ssm_multipliers", 5) or (1.0,) * 5
    mixer = mamba.mixer(
        f"{at}mamba.",
        shape.hidden,
        layer,
        eps,
        in_bias=config.flag("mamba_proj_bias", False),
        out_bias=config.flag("projectors_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
        norm=config.flag("mamba_rms_norm", False),
        norms_first=config.flag("mamba_norm_before_gate", True),
        norms_groups=mamba.groups > 1,
        dt_limits=read_dt_limits(config),
        multipliers=tuple(inputs * section for section in sections),
    )
    return Block(mixer, multiplier=config.number("ssm_out_multiplier", 1.0))


def _problem(config: Config) -> str:
    for bias, multiplier in (("attention_bias", "attention_in_multiplier"), ("mamba_proj_bias", "ssm_in_multiplier")):
        if config.flag(bias, False) and config.number(multiplier, 1.0) != 1.0:
            return f"it has both {bias} and {multiplier}"
    return activation_problem(config, "hidden_act")
