"""Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention, MLP or experts."""

from __future__ import annotations

from windowpane.kv.retention import Full
from windowpane.models.blocks import SIGMOID, UNGATED, Block, Decoder, GatedMLP, Layer, Mixer, Projection, Router
from windowpane.models.building import Norms, attention, beside, described_spec, experts, gated_mlp
from windowpane.models.config import Config, ModelError
from windowpane.models.families.mamba import Mamba, read_dt_limits, read_heads
from windowpane.models.parts import (
    FULL,
    LINEAR,
    Shape,
    activation_problem,
    embeddings,
    experts_per_token,
    mlp_tensors,
    read_shape,
    separate_experts,
    whole,
    with_biases,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

ARCHITECTURES = ("NemotronHForCausalLM",)

PATTERN_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
BLOCK_TYPES = {"mamba": LINEAR, "attention": FULL, LINEAR: LINEAR, FULL: FULL, "mlp": "mlp", "moe": "moe"}


def read(config: Config, name: str) -> ModelSpec:
    kinds = _kinds(config)
    defaults = {"num_hidden_layers": len(kinds)}
    if config.has("attention_head_dim"):
        defaults["head_dim"] = config.integer("attention_head_dim")
    shape = read_shape(config, config, tied=False, defaults=defaults)
    if shape.layers != len(kinds):
        raise ModelError(f"num_hidden_layers is {shape.layers}, but the layer pattern names {len(kinds)} layers")
    mamba = _mamba(config) if LINEAR in kinds else None
    norms = Norms(shape.hidden, config.number("layer_norm_epsilon", config.number("rms_norm_eps", 1e-5)))
    activation = config.text("mlp_hidden_act") or "relu2"
    bias, mlp_bias = config.flag("use_bias", False), config.flag("mlp_bias", False)
    layers = []
    for layer, kind in enumerate(kinds):
        at = f"backbone.layers.{layer}.mixer."
        if kind == FULL:
            mixer: Mixer = attention(
                at, shape, shape.cache(layer, Full()), rope=None, bias=config.flag("attention_bias", False)
            )
        elif kind == LINEAR and mamba:
            mixer = mamba.mixer(
                at, shape.hidden, layer, norms.eps, in_bias=bias, out_bias=bias,
                conv_bias=config.flag("use_conv_bias", True), norms_groups=mamba.groups > 1,
                dt_limits=read_dt_limits(config),
            )  # fmt: skip
        elif kind == "mlp":
            mixer = _mlp(at, shape, config.integer("intermediate_size"), activation, mlp_bias)
        else:
            mixer = _experts(at, config, shape, layer, activation)
        layers.append((Block(mixer, before=norms(f"backbone.layers.{layer}.norm")),))
    table, *head = embeddings("backbone.", shape, table="embeddings")
    described = Decoder(
        table,
        tuple(Layer(blocks) for blocks in layers),
        norms("backbone.norm_f"),
        Projection.of(head) if head else None,
    )
    return described_spec(
        config, config, shape, name=name, family="nemotron_h", decoder=described, towers=_latent(config, shape, kinds),
        planned_only=_problem(config, kinds, activation),
    )  # fmt: skip


def _problem(config: Config, kinds: tuple[str, ...], activation: str) -> str:
    """What no lowering has, or nothing."""
    if "moe" in kinds and config.has("moe_latent_size"):
        return "its experts work on projections of their inputs (moe_latent_size)"
    if activation not in UNGATED and ("mlp" in kinds or "moe" in kinds):
        return f"mlp_hidden_act is {activation!r}, and MLPs without a gate run with {', '.join(UNGATED)} only"
    return activation_problem(config, "mamba_hidden_act") if LINEAR in kinds else ""


def _kinds(config: Config) -> tuple[str, ...]:
    """`layers_block_type` names the layers; older configs spell them as letters."""
    blocks = config.texts("layers_block_type")
    if blocks is not None:
        for block in blocks:
            if block not in BLOCK_TYPES:
                raise config.unknown_value("layers_block_type", block, BLOCK_TYPES)
        return tuple(BLOCK_TYPES[block] for block in blocks)
    pattern = config.text("hybrid_override_pattern")
    if pattern is None:
        raise ModelError(
            "the config has neither layers_block_type nor hybrid_override_pattern, so its layers are unknown"
        )
    for letter in pattern:
        if letter not in PATTERN_LETTERS:
            raise config.unknown_value("hybrid_override_pattern", letter, PATTERN_LETTERS)
    return tuple(PATTERN_LETTERS[letter] for letter in pattern)


def _mamba(config: Config) -> Mamba:
    heads, groups = read_heads(config, "mamba_num_heads", "n_groups")
    return Mamba(
        heads=heads,
        head_dim=config.integer("mamba_head_dim"),
        groups=groups,
        state=config.integer("ssm_state_size"),
        kernel=config.integer("conv_kernel", minimum=2),
        state_dtype=config.dtype("mamba_ssm_cache_dtype"),
    )


def _mlp(prefix: str, shape: Shape, width: int, activation: str, bias: bool) -> GatedMLP:
    tensors = mlp_tensors(prefix, shape.hidden, width, bias=bias, gated=False)
    return gated_mlp("", shape, width, activation, tensors=tensors)


def _experts(prefix: str, config: Config, shape: Shape, layer: int, activation: str) -> Mixer:
    count, width = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    inputs = config.integer("moe_latent_size") if config.has("moe_latent_size") else shape.hidden
    router = Router(
        whole(f"{prefix}gate.weight", count, shape.hidden),
        experts_per_token(config, count),
        scoring=SIGMOID,
        correction=whole(f"{prefix}gate.e_score_correction_bias", count),
        renormalizes=config.flag("norm_topk_prob", True),
        multiplier=config.number("routed_scaling_factor", 1.0),
        groups=config.integer("n_group", 1),
        chosen_groups=config.integer("topk_group", 1),
    )
    tensors = separate_experts(f"{prefix}experts.", count, inputs, width, gated=False)
    routed = experts(layer, router, tensors, activation)
    shared_width = config.integer("moe_shared_expert_intermediate_size")
    return beside(
        routed, _mlp(f"{prefix}shared_experts.", shape, shared_width, activation, config.flag("mlp_bias", False))
    )


def _latent(config: Config, shape: Shape, kinds: tuple[str, ...]) -> list[TensorSpec]:
    """Projections in front of routed experts and behind them, which no lowering has."""
    if not config.has("moe_latent_size"):
        return []
    width, found = config.integer("moe_latent_size"), []
    for prefix in (f"backbone.layers.{layer}.mixer." for layer, kind in enumerate(kinds) if kind == "moe"):
        found += [
            whole(f"{prefix}fc1_latent_proj.weight", width, shape.hidden, linear=True),
            whole(f"{prefix}fc2_latent_proj.weight", shape.hidden, width, linear=True),
        ]
    return with_biases(found) if config.flag("mlp_bias", False) else found
