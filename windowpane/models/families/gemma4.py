"""Gemma 4: sliding and full layers with their own head sizes, K and V from one projection in full layers, shared KV,
per-layer embeddings, and (26B-A4B) experts beside the dense MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from windowpane.kv.caches import TokenCache
from windowpane.models.blocks import Attention, Block, Experts, Layer, Norm, PerLayerEmbedding, Router, Sum
from windowpane.models.building import Norms, attention, decoder, described_spec, experts, gated_mlp, per_layer_inputs
from windowpane.models.config import Config, ModelError, every
from windowpane.models.families import towers
from windowpane.models.parts import (
    FULL,
    SLIDING,
    Shape,
    causal_only,
    experts_per_token,
    first_kv_shared_layer,
    fused_experts,
    read_shape,
    retention,
    whole,
)
from windowpane.models.rope import DEFAULT, PROPORTIONAL, Rope, rope_of, section_of_type
from windowpane.models.spec import ModelSpec

UNIFIED = ("Gemma4UnifiedForConditionalGeneration", "Gemma4UnifiedForCausalLM")
ARCHITECTURES = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", *UNIFIED)

DEFAULTS = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
DEFAULT_ROPES: dict[str, object] = {
    SLIDING: {"rope_type": DEFAULT, "rope_theta": 10_000.0},
    FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
UNIFIED_DEFAULTS = DEFAULTS | {"max_position_embeddings": 262_144}


def read(config: Config, name: str) -> ModelSpec:
    nested = config.has("text_config")
    text = config.section("text_config") if nested else config
    unified = (config.texts("architectures") or ("",))[0] in UNIFIED
    causal_only(text, allowed=("vision",))
    shape = read_shape(config, text, tied=True, defaults=UNIFIED_DEFAULTS if unified else DEFAULTS)
    block_norms = Norms(shape.hidden, text.number("rms_norm_eps", 1e-6))
    activation = text.text("hidden_activation") or "gelu_pytorch_tanh"
    prefix = "model.language_model." if nested else "model."
    per_layer_width = 0 if unified else text.integer("hidden_size_per_layer_input", 256, minimum=0)
    per_layer: PerLayerEmbedding | None = None
    last_blocks: list[tuple[Block, ...]] = [()] * shape.layers
    if per_layer_width:
        vocab = text.integer("vocab_size_per_layer_input", 262_144)
        per_layer, blocks = per_layer_inputs(prefix, shape, vocab, per_layer_width, block_norms, activation)
        last_blocks = [(block,) for block in blocks]
    layers = []
    for mixer, last in zip(_attentions(text, shape, prefix, block_norms, unified), last_blocks, strict=True):
        at = f"{prefix}layers.{mixer.layer}."
        mlp = gated_mlp(f"{at}mlp.", shape, _mlp_width(text, not mixer.owns_kv), activation)
        scalar = whole(f"{at}layer_scalar", 1)
        attends, feeds = block_norms.both(at, mixer, mlp)
        if text.flag("enable_moe_block", False):
            feeds = _beside(feeds, _experts(text, shape, at, mixer.layer, block_norms, activation), at, block_norms)
        layers.append(Layer((attends, feeds, *last), scalar))
    described = decoder(
        prefix,
        shape,
        layers,
        block_norms(f"{prefix}norm"),
        per_layer=per_layer,
        embedding_multiplier=shape.hidden**0.5,
        logit_softcap=text.optional_number("final_logit_softcapping"),
    )
    vision = (towers.gemma4_unified if unified else towers.gemma4)(config, shape.hidden) if nested else []
    return described_spec(config, text, shape, name=name, family="gemma4", decoder=described, towers=vision)


def _attentions(text: Config, shape: Shape, prefix: str, block_norms: Norms, unified: bool) -> list[Attention]:
    """Of every layer; those that own no cache share the last one of their own kind."""
    one_projection = text.flag("attention_k_eq_v", False)
    first_shared = first_kv_shared_layer(text, shape.layers)
    kinds = layer_kinds(text, shape.layers)
    shapes = shapes_of(text, shape, kinds)
    owners: dict[str, Attention] = {}
    found = []
    for layer, kind in enumerate(kinds):
        if layer >= first_shared and kind not in owners:
            raise ModelError(f"{text.where}num_kv_shared_layers: layer {layer} shares KV, and no {kind} layer owns any")
        keeps = retention(kind, text, 1024 if unified else 512)
        cache = shapes[kind].cache(layer, keeps, latent=kind == FULL and one_projection)
        at = f"{prefix}layers.{layer}.self_attn."
        if layer < first_shared:
            mixer = attention_of(text, kind, shapes[kind], at, cache, layer, block_norms)
            owners[kind] = mixer = replace(mixer, v_norm=Norm(block_norms.eps))
        else:
            mixer = sharing_attention(text, kind, shapes[kind], at, owners[kind], layer, block_norms)
        found.append(mixer)
    return found


def sharing_attention(
    text: Config, kind: str, shape: Shape, at: str, owner: Attention, layer: int, block_norms: Norms
) -> Attention:
    """Of a layer that makes queries only."""
    mixer = attention_of(text, kind, shape, at, owner.cache, layer, block_norms)
    return replace(mixer, k_norm=owner.k_norm)  # keys are rebuilt from latents


def attention_of(
    text: Config, kind: str, shape: Shape, at: str, cache: TokenCache, layer: int, block_norms: Norms
) -> Attention:
    return attention(
        at,
        shape,
        cache,
        layer=layer,
        rope=_rope(text, kind, shape),
        scale=1.0,
        bias=text.flag("attention_bias", False),
        head_norms=block_norms.of_heads(shape.head_dim),
    )


def _rope(text: Config, kind: str, shape: Shape) -> Rope:
    """From `rope_parameters` by layer type: this family has no older fields."""
    if text.has("rope_scaling"):
        raise ModelError(f"{text.where}rope_scaling is no field of Gemma 4: put it into rope_parameters.{FULL}")
    outer = text.section("rope_parameters") if text.has("rope_parameters") else Config(DEFAULT_ROPES)
    section = section_of_type(text, outer, kind, outer.section(kind).fields)
    return rope_of(section, shape.head_dim, shape.max_position)


def layer_kinds(text: Config, layers: int) -> tuple[str, ...]:
    kinds = text.layer_types(layers, (FULL, SLIDING), every(6, FULL, SLIDING, layers))
    # The model code makes the last layer full whatever the config says.
    return (*kinds[:-1], FULL)


def shapes_of(text: Config, shape: Shape, kinds: Sequence[str]) -> dict[str, Shape]:
    """Full layers have their own head size, and their own KV heads only where K and V are one projection.

    Newer configs say it in `per_layer_config`, and then transformers reads no other field.
    """
    if "per_layer_config" in text.fields:
        return _shapes_by_layer(text, shape, kinds)
    kv_heads = shape.kv_heads
    if text.flag("attention_k_eq_v", False):
        kv_heads = text.integer("num_global_key_value_heads", kv_heads)
    return {SLIDING: shape, FULL: replace(shape, head_dim=text.integer("global_head_dim", 512), kv_heads=kv_heads)}


def _shapes_by_layer(text: Config, shape: Shape, kinds: Sequence[str]) -> dict[str, Shape]:
    """`per_layer_config`: what layers have otherwise than the model, by their number with leading zeros."""
    given = text.section("per_layer_config") if text.has("per_layer_config") else Config({})
    if odd := [key for key in given.fields if not (key.isdecimal() and int(key) < len(kinds))]:
        raise ModelError(f"{given.where[:-1]}: {odd[0]!r} is no number of one of {len(kinds)} layers")
    changed = {int(key): given.section(key) for key in given.fields}
    found: dict[str, Shape] = {}
    for layer, kind in enumerate(kinds):
        section = changed.get(layer, Config({}))
        for key in section.fields.keys() - {"head_dim", "num_key_value_heads"}:
            raise ModelError(f"{section.where}{key}: layers can differ in head_dim and num_key_value_heads alone")
        head_dim = section.integer("head_dim", shape.head_dim)
        kv_heads = section.integer("num_key_value_heads", shape.kv_heads)
        if shape.query_heads % kv_heads:
            raise ModelError(f"{section.where}num_key_value_heads is {kv_heads}, no divisor of {shape.query_heads}")
        own = replace(shape, head_dim=head_dim, kv_heads=kv_heads)
        if found.setdefault(kind, own) != own:
            raise ModelError(f"{given.where[:-1]}: layer {layer} differs from other {kind} layers, which must be alike")
    return {SLIDING: shape, FULL: shape} | found


def _mlp_width(text: Config, shares_kv: bool) -> int:
    """Layers that share KV spend the saved weights on an MLP twice as wide, where the config asks for it."""
    doubled = shares_kv and text.flag("use_double_wide_mlp", False)
    return text.integer("intermediate_size") * (2 if doubled else 1)


def _beside(feeds: Block, mixer: Experts, at: str, norms: Norms) -> Block:
    """The dense MLP and experts side by side: the router reads the residual stream, each branch has its own norms."""
    dense = Block(feeds.mixer, before=feeds.before, after=norms(f"{at}post_feedforward_layernorm_1"))
    routed = Block(mixer, after=norms(f"{at}post_feedforward_layernorm_2"))
    return Block(Sum((dense, routed)), after=feeds.after)


def _experts(text: Config, shape: Shape, at: str, layer: int, norms: Norms, activation: str) -> Experts:
    count, width = text.integer("num_experts"), text.integer("moe_intermediate_size")
    router = Router(
        whole(f"{at}router.proj.weight", count, shape.hidden),
        experts_per_token(text, count, "top_k_experts"),
        expert_scales=whole(f"{at}router.per_expert_scale", count),
        norm=Norm(norms.eps, whole(f"{at}router.scale", shape.hidden)),
        logit_multiplier=shape.hidden**-0.5,
        renormalizes=True,
    )
    tensors = fused_experts(f"{at}experts.", count, shape.hidden, width, transposed=False)
    return experts(layer, router, tensors, activation, norm=norms(f"{at}pre_feedforward_layernorm_2"))
