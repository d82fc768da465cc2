"""Gemma 4: sliding and full layers with their own head sizes, K and V from one projection in full layers, shared KV,
per-layer embeddings, and (26B-A4B) experts beside the dense MLP."""

from __future__ import annotations

from dataclasses import replace

from windowpane.kv.caches import TokenCache
from windowpane.models.config import Config, every
from windowpane.models.families import towers
from windowpane.models.parts import (
    FULL,
    SANDWICH_NORMS,
    SLIDING,
    Shape,
    attention,
    causal_only,
    embeddings,
    first_kv_shared_layer,
    fused_experts,
    mlp,
    model_spec,
    norms,
    per_layer_embeddings,
    read_shape,
    retention,
    whole,
)
from windowpane.models.spec import ModelSpec, TensorSpec

UNIFIED = ("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedForCausalLM")
ARCHITECTURES = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", *UNIFIED)

DEFAULTS = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
UNIFIED_DEFAULTS = DEFAULTS | {"max_position_embeddings": 262_144}


def read(config: Config, name: str) -> ModelSpec:
    nested = config.has("text_config")
    text = config.section("text_config") if nested else config
    unified = (config.texts("architectures") or ("",))[0] in UNIFIED
    causal_only(text, allowed=("vision",))
    shape = read_shape(config, text, tied=True, defaults=UNIFIED_DEFAULTS if unified else DEFAULTS)
    kinds = layer_kinds(text, shape.layers)
    full_shape = _full_layer_shape(text, shape)
    one_projection = text.flag("attention_k_eq_v", False)
    first_shared = first_kv_shared_layer(text, shape.layers)
    window = 1024 if unified else 512
    prefix = "model.language_model." if nested else "model."

    caches: list[TokenCache] = []
    shared: list[TokenCache] = []
    tensors: list[TensorSpec] = embeddings(prefix, shape)
    for layer, kind in enumerate(kinds):
        layer_shape = full_shape if kind == FULL else shape
        latent = kind == FULL and one_projection
        owns_kv = layer < first_shared
        dim, keeps = layer_shape.head_dim, retention(kind, text, window)
        cache = TokenCache(layer, keeps, layer_shape.kv_heads, dim, dim, latent=latent)
        (caches if owns_kv else shared).append(cache)
        tensors += attention(
            f"{prefix}layers.{layer}.self_attn.",
            layer_shape,
            bias=text.flag("attention_bias", False),
            qk_norm=True,
            owns_kv=owns_kv,
            has_v=not latent,
        )
        tensors += _feed_forward(f"{prefix}layers.{layer}.", text, shape.hidden, _mlp_width(text, not owns_kv))
        tensors += _layer_extras(f"{prefix}layers.{layer}.", shape.hidden)
    tensors += norms(prefix, ("norm",), shape.hidden)
    per_layer_width = 0 if unified else text.integer("hidden_size_per_layer_input", 256, minimum=0)
    if per_layer_width:
        vocab = text.integer("vocab_size_per_layer_input", 262_144)
        tensors += per_layer_embeddings(prefix, shape, vocab, per_layer_width)
    if nested:
        tensors += towers.gemma4_unified(config, shape.hidden) if unified else towers.gemma4(config, shape.hidden)
    return model_spec(
        config,
        text,
        shape,
        name=name,
        family="gemma4",
        widest_mlp=_widest(text, first_shared < shape.layers),
        caches=caches,
        tensors=tensors,
        shared_caches=shared,
    )


def layer_kinds(text: Config, layers: int) -> tuple[str, ...]:
    kinds = text.layer_types(layers, (FULL, SLIDING), every(6, FULL, SLIDING, layers))
    # The model code makes the last layer full whatever the config says.
    return (*kinds[:-1], FULL)


def _full_layer_shape(text: Config, shape: Shape) -> Shape:
    """Full layers have their own head size, and their own KV heads only where K and V are one projection."""
    kv_heads = shape.kv_heads
    if text.flag("attention_k_eq_v", False):
        kv_heads = text.integer("num_global_key_value_heads", kv_heads)
    return replace(shape, head_dim=text.integer("global_head_dim", 512), kv_heads=kv_heads)


def _mlp_width(text: Config, shares_kv: bool) -> int:
    """Layers that share KV spend the saved weights on an MLP twice as wide, where the config asks for it."""
    doubled = shares_kv and text.flag("use_double_wide_mlp", False)
    return text.integer("intermediate_size") * (2 if doubled else 1)


def _widest(text: Config, any_shared: bool) -> int:
    width = _mlp_width(text, any_shared)
    if text.flag("enable_moe_block", False):
        # Experts run beside the dense MLP.
        width += text.integer("top_k_experts") * text.integer("moe_intermediate_size")
    return width


def _feed_forward(prefix: str, text: Config, hidden: int, width: int) -> list[TensorSpec]:
    tensors = mlp(f"{prefix}mlp.", hidden, width)
    if text.flag("enable_moe_block", False):
        experts = text.integer("num_experts")
        tensors += [
            whole(f"{prefix}router.scale", hidden),
            whole(f"{prefix}router.per_expert_scale", experts),
            whole(f"{prefix}router.proj.weight", experts, hidden),
        ]
        moe_width = text.integer("moe_intermediate_size")
        tensors += fused_experts(f"{prefix}experts.", experts, hidden, moe_width, transposed=False)
        names = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        tensors += norms(prefix, names, hidden)
    return tensors


def _layer_extras(prefix: str, hidden: int) -> list[TensorSpec]:
    return [*norms(prefix, SANDWICH_NORMS, hidden), whole(f"{prefix}layer_scalar", 1)]
