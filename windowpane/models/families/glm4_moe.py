"""GLM 4.5, 4.6 and 4.7: grouped attention, dense layers first, then experts with shared ones beside them."""

from __future__ import annotations

from windowpane.kv.retention import Full
from windowpane.models.blocks import SIGMOID, Mixer, Router
from windowpane.models.building import Norms, attention, beside, decoder, described_spec, experts, gated_mlp
from windowpane.models.config import Config, ModelError
from windowpane.models.parts import (
    Shape,
    even_head_dim,
    experts_per_token,
    mtp_notes,
    read_shape,
    separate_experts,
    whole,
)
from windowpane.models.rope import read_rope
from windowpane.models.spec import ModelSpec

ARCHITECTURES = ("Glm4MoeForCausalLM",)


def read(config: Config, name: str) -> ModelSpec:
    shape = read_shape(config, config, tied=False, defaults={"head_dim": even_head_dim(config)})
    first_sparse = config.integer("first_k_dense_replace", 1, minimum=0)
    block_norms = Norms(shape.hidden, config.number("rms_norm_eps", 1e-5))
    rope = read_rope(config, shape.head_dim, shape.max_position, partial=0.5)
    activation = config.text("hidden_act") or "silu"
    layers = []
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        mixer = attention(
            f"{at}self_attn.",
            shape,
            shape.cache(layer, Full()),
            rope=rope,
            bias=config.flag("attention_bias", False),
            out_bias=False,
            head_norms=block_norms.of_heads(shape.head_dim) if config.flag("use_qk_norm", False) else None,
        )
        if layer < first_sparse:
            mlp: Mixer = gated_mlp(f"{at}mlp.", shape, config.integer("intermediate_size"), activation)
        else:
            mlp = _experts(config, shape, f"{at}mlp.", layer, activation)
        layers.append(block_norms.pre(at, mixer, mlp))
    described = decoder("model.", shape, layers, block_norms("model.norm"))
    notes = mtp_notes(config)
    return described_spec(config, config, shape, name=name, family="glm4_moe", decoder=described, notes=notes)


def _experts(config: Config, shape: Shape, at: str, layer: int, activation: str) -> Mixer:
    count, width = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    config.choice("scoring_func", ("sigmoid",))
    config.choice("topk_method", ("noaux_tc",))
    groups = config.integer("n_group", 1)
    if count % groups:
        raise ModelError(f"{config.where}n_group is {groups}, which does not divide {count} experts")
    router = Router(
        whole(f"{at}gate.weight", count, shape.hidden),
        experts_per_token(config, count),
        SIGMOID,
        correction=whole(f"{at}gate.e_score_correction_bias", count, dtype="float32"),
        renormalizes=config.flag("norm_topk_prob", True),
        multiplier=config.number("routed_scaling_factor", 1.0),
        groups=groups,
        chosen_groups=config.integer("topk_group", 1),
    )
    routed = experts(layer, router, separate_experts(f"{at}experts.", count, shape.hidden, width), activation)
    shared = config.integer("n_shared_experts", 1, minimum=0)
    return beside(routed, gated_mlp(f"{at}shared_experts.", shape, shared * width, activation) if shared else None)
