"""Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention, MLP or experts."""

from __future__ import annotations

from windowpane.kv.caches import StateCache, TokenCache
from windowpane.kv.retention import Full
from windowpane.models.config import Config, ModelError
from windowpane.models.families.mamba import Mamba
from windowpane.models.parts import (
    FULL,
    LINEAR,
    Shape,
    attention_tensors,
    embeddings,
    experts_per_token,
    mlp_tensors,
    model_spec,
    norms,
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
    caches: list[TokenCache | StateCache] = []
    tensors: list[TensorSpec] = embeddings("backbone.", shape, table="embeddings")
    for layer, kind in enumerate(kinds):
        prefix = f"backbone.layers.{layer}.mixer."
        if kind == FULL:
            caches.append(shape.cache(layer, Full()))
            tensors += attention_tensors(prefix, shape)
        elif kind == LINEAR and mamba:
            caches.append(mamba.cache(layer))
            bias = config.flag("use_bias", False)
            conv_bias = config.flag("use_conv_bias", True)
            tensors += mamba.tensors(prefix, shape.hidden, in_bias=bias, out_bias=bias, conv_bias=conv_bias)
        elif kind == "mlp":
            width, bias = config.integer("intermediate_size"), config.flag("mlp_bias", False)
            tensors += mlp_tensors(prefix, shape.hidden, width, bias=bias, gated=False)
        else:
            tensors += _experts(prefix, config, shape)
        tensors += norms(f"backbone.layers.{layer}.", ("norm",), shape.hidden)
    tensors += norms("backbone.", ("norm_f",), shape.hidden)
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="nemotron_h",
        widest_mlp=_widest(config, kinds),
        caches=caches,
        tensors=tensors,
    )


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
    return Mamba(
        heads=config.integer("mamba_num_heads"),
        head_dim=config.integer("mamba_head_dim"),
        groups=config.integer("n_groups"),
        state=config.integer("ssm_state_size"),
        kernel=config.integer("conv_kernel", minimum=2),
        state_dtype=config.dtype("mamba_ssm_cache_dtype"),
    )


def _experts(prefix: str, config: Config, shape: Shape) -> list[TensorSpec]:
    experts, width = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    bias = config.flag("mlp_bias", False)
    routed_input = shape.hidden
    latent: list[TensorSpec] = []
    if config.has("moe_latent_size"):
        routed_input = config.integer("moe_latent_size")
        latent = [
            whole(f"{prefix}fc1_latent_proj.weight", routed_input, shape.hidden, linear=True),
            whole(f"{prefix}fc2_latent_proj.weight", shape.hidden, routed_input, linear=True),
        ]
    return [
        whole(f"{prefix}gate.weight", experts, shape.hidden),
        whole(f"{prefix}gate.e_score_correction_bias", experts),
        *separate_experts(f"{prefix}experts.", experts, routed_input, width, gated=False),
        *mlp_tensors(f"{prefix}shared_experts.", shape.hidden, _shared_width(config), bias=bias, gated=False),
        *(with_biases(latent) if bias else latent),
    ]


def _shared_width(config: Config) -> int:
    return config.integer("moe_shared_expert_intermediate_size")


def _widest(config: Config, kinds: tuple[str, ...]) -> int:
    widths = [config.integer("intermediate_size")] if "mlp" in kinds else []
    if "moe" in kinds:
        visited = experts_per_token(config, config.integer("n_routed_experts"))
        routed = visited * config.integer("moe_intermediate_size")
        widths.append(routed + _shared_width(config))
    return max(widths)
