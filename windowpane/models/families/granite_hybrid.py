"""Granite 4 H: Mamba-2 layers with a few full ones, and experts beside a shared MLP on every layer."""

from __future__ import annotations

from windowpane.kv.retention import Full
from windowpane.models.blocks import CHOSEN_SOFTMAX, Experts, Mixer, Router
from windowpane.models.building import Norms, attention, beside, decoder, described_spec, experts, gated_mlp
from windowpane.models.config import Config
from windowpane.models.families.mamba import read_dt_limits, read_mamba_d
from windowpane.models.parts import (
    FULL,
    LINEAR,
    Shape,
    activation_problem,
    even_head_dim,
    experts_per_token,
    fused_mlp_tensors,
    is_from_gguf,
    mlp_tensors,
    read_shape,
    separate_experts,
    whole,
)
from windowpane.models.rope import read_rope
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)

KINDS = {"mamba": LINEAR, "attention": FULL, LINEAR: LINEAR, FULL: FULL}


def read(config: Config, name: str) -> ModelSpec:
    defaults = {"head_dim": even_head_dim(config), "num_key_value_heads": config.integer("num_attention_heads")}
    shape = read_shape(config, config, tied=False, defaults=defaults)
    kinds = config.layer_types(shape.layers, KINDS, (LINEAR,) * shape.layers)
    mamba = read_mamba_d(config, config.integer("mamba_expand", 2) * shape.hidden)
    count, shared_width = config.integer("num_local_experts", minimum=0), config.integer("shared_intermediate_size")
    bias, conv_bias = config.flag("mamba_proj_bias", False), config.flag("mamba_conv_bias", True)
    norms = Norms(shape.hidden, config.number("rms_norm_eps", 1e-6))
    activation = config.text("hidden_act") or "silu"
    rotates = config.text("position_embedding_type") == "rope"
    rope = read_rope(config, shape.head_dim, shape.max_position) if rotates else None
    layers = []
    for layer, kind in enumerate(kinds):
        at = f"model.layers.{layer}."
        if KINDS[kind] == FULL:
            mixer: Mixer = attention(
                f"{at}self_attn.",
                shape,
                shape.cache(layer, Full()),
                rope=rope,
                scale=config.number("attention_multiplier", 1.0),
                bias=config.flag("attention_bias", False),
            )
        else:
            mixer = mamba.mixer(
                f"{at}mamba.", shape.hidden, layer, norms.eps, in_bias=bias, out_bias=bias, conv_bias=conv_bias,
                dt_limits=read_dt_limits(config),
            )  # fmt: skip
        shared = _shared(config, f"{at}shared_mlp.", shape.hidden, shared_width)
        shared_mlp = gated_mlp("", shape, shared_width, activation, tensors=shared)
        mlp: Mixer = shared_mlp
        if count:
            mlp = beside(_experts(config, f"{at}block_sparse_moe.", shape, layer, count, activation), shared_mlp)
        layers.append(norms.pre(at, mixer, mlp, config.number("residual_multiplier", 1.0)))
    described = decoder(
        "model.",
        shape,
        layers,
        norms("model.norm"),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logit_multiplier=1 / config.divisor("logits_scaling", 1.0),
    )
    has_mamba = any(KINDS[kind] == LINEAR for kind in kinds)
    problem = activation_problem(config, "hidden_act") if has_mamba else ""
    return described_spec(
        config, config, shape, name=name, family="granite_hybrid", decoder=described, planned_only=problem
    )


def _shared(config: Config, prefix: str, hidden: int, width: int) -> list[TensorSpec]:
    if is_from_gguf(config):
        return mlp_tensors(prefix, hidden, width)
    return fused_mlp_tensors(prefix, hidden, width, names=("input_linear", "output_linear"))


def _experts(config: Config, prefix: str, shape: Shape, layer: int, count: int, activation: str) -> Experts:
    shard, width, hidden = Shard(0, ((count, count),)), config.integer("intermediate_size"), shape.hidden
    tensors = [
        TensorSpec(f"{prefix}input_linear.weight", (count, 2 * width, hidden), shard, linear=True, part="experts"),
        TensorSpec(f"{prefix}output_linear.weight", (count, hidden, width), shard, linear=True, part="experts"),
    ]
    if is_from_gguf(config):
        tensors = separate_experts(f"{prefix}experts.", count, hidden, width)
    weight = whole(f"{prefix}router.layer.weight", count, hidden)
    router = Router(weight, experts_per_token(config, count), scoring=CHOSEN_SOFTMAX)
    return experts(layer, router, tensors, activation)
