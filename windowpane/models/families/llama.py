"""Llama 3, SmolLM2 (the same architecture), SmolLM3 (some layers without rotation), Granite (multipliers), Seed-OSS."""

from __future__ import annotations

from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config
from windowpane.models.parts import FULL, SLIDING, even_head_dim, read_shape, retention
from windowpane.models.rope import read_rope
from windowpane.models.spec import ModelSpec

SMOLLM3, GRANITE, SEED = "SmolLM3ForCausalLM", "GraniteForCausalLM", "SeedOssForCausalLM"
ARCHITECTURES = ("LlamaForCausalLM", SMOLLM3, GRANITE, SEED)


def read(config: Config, name: str) -> ModelSpec:
    architecture = (config.texts("architectures") or ARCHITECTURES)[0]
    is_smollm3 = architecture == SMOLLM3
    is_seed = architecture == SEED
    defaults = {"head_dim": 128 if is_seed else even_head_dim(config)}
    if not is_smollm3:
        defaults["num_key_value_heads"] = config.integer("num_attention_heads")
    shape = read_shape(config, config, tied=is_smollm3, defaults=defaults)
    has_rope = _smollm3_rope(config, shape.layers) if is_smollm3 else (1,) * shape.layers
    kinds = _smollm3_kinds(config, has_rope) if is_smollm3 else (FULL,) * shape.layers
    theta = 2e6 if is_smollm3 else 1e4
    rope = read_rope(config, shape.head_dim, shape.max_position, theta)
    norms = Norms(shape.hidden, config.number("rms_norm_eps", 1e-6))
    # Llama and SmolLM3 have no such fields, and transformers would ignore them.
    factors = Config(config.fields if architecture == GRANITE else {})
    layers = []
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        mixer = attention(
            f"{prefix}self_attn.",
            shape,
            shape.cache(layer, retention(kind, config)),
            rope=rope if has_rope[layer] else None,
            scale=factors.number("attention_multiplier", 1.0) if architecture == GRANITE else None,
            bias=config.flag("attention_bias", is_seed),
            out_bias=config.flag("attention_out_bias", False) if is_seed else None,
        )
        mlp = gated_mlp(
            f"{prefix}mlp.",
            shape,
            config.integer("intermediate_size"),
            config.text("hidden_act") or "silu",
            bias=config.flag("mlp_bias", False),
        )
        layers.append(norms.pre(prefix, mixer, mlp, factors.number("residual_multiplier", 1.0)))
    described = decoder(
        "model.",
        shape,
        layers,
        norms("model.norm"),
        embedding_multiplier=factors.number("embedding_multiplier", 1.0),
        logit_multiplier=1 / factors.divisor("logits_scaling", 1.0),
    )
    return described_spec(config, config, shape, name=name, family="llama", decoder=described)


def _smollm3_rope(config: Config, layers: int) -> tuple[int, ...]:
    """1 for layers with rotary positions, 0 for those without."""
    interval = config.integer("no_rope_layer_interval", 4)
    by_rule = tuple(int((i + 1) % interval != 0) for i in range(layers))
    return config.integers("no_rope_layers", layers) or by_rule


def _smollm3_kinds(config: Config, has_rope: tuple[int, ...]) -> tuple[str, ...]:
    """Before `layer_types`, sliding windows were on the layers without rotary positions."""
    slides = config.flag("use_sliding_window", False) and config.has("sliding_window")
    rule = (SLIDING if slides and not rope else FULL for rope in has_rope)
    return config.layer_types(len(has_rope), (FULL, SLIDING), rule)
