"""Llama 4: layers with rotary positions see their own chunk, the others everything; experts in some or all layers."""

from __future__ import annotations

from dataclasses import replace

from windowpane.models.blocks import CHOSEN_SIGMOID, Mixer, Norm, Router, Temperature
from windowpane.models.building import Norms, attention, beside, decoder, described_spec, experts, gated_mlp
from windowpane.models.config import Config
from windowpane.models.families import towers
from windowpane.models.parts import (
    CHUNKED,
    FULL,
    Shape,
    experts_per_token,
    fused_experts,
    read_shape,
    retention,
    whole,
)
from windowpane.models.rope import read_rope
from windowpane.models.spec import ModelSpec

ARCHITECTURES = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")

DEFAULTS = {
    "vocab_size": 202_048,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}


def read(config: Config, name: str) -> ModelSpec:
    nested = config.has("text_config")
    text = config.section("text_config") if nested else config
    shape = read_shape(config, text, tied=False, defaults=DEFAULTS)
    sparse = _moe_layers(text, shape.layers)
    block_norms = Norms(shape.hidden, text.number("rms_norm_eps", 1e-5))
    rope = read_rope(text, shape.head_dim, shape.max_position, theta=500_000.0).with_interleaved_pairs()
    activation = text.text("hidden_act") or "silu"
    wrapper = "language_model." if nested else ""
    rotates = _rotates(text, shape.layers)
    layers = []
    for layer, kind in enumerate(_kinds(text, rotates)):
        at = f"{wrapper}model.layers.{layer}."
        mixer = attention(
            f"{at}self_attn.",
            shape,
            shape.cache(layer, retention(kind, text, default_chunk=8192)),
            rope=rope if rotates[layer] else None,
            bias=text.flag("attention_bias", False),
        )
        if rotates[layer] and text.flag("use_qk_norm", True):
            # transformers norms behind the rotation, which changes no norm.
            mixer = replace(mixer, q_norm=Norm(block_norms.eps), k_norm=Norm(block_norms.eps))
        if not rotates[layer] and text.flag("attn_temperature_tuning", True):
            grows = Temperature(text.number("attn_scale", 0.1), text.number("floor_scale", 8192.0))
            mixer = replace(mixer, temperature=grows)
        if layer in sparse:
            mlp: Mixer = _experts(text, shape, f"{at}feed_forward.", layer, activation)
        else:
            width = text.integer("intermediate_size_mlp", 16_384)
            mlp = gated_mlp(f"{at}feed_forward.", shape, width, activation)
        layers.append(block_norms.pre(at, mixer, mlp))
    described = decoder(
        f"{wrapper}model.", shape, layers, block_norms(f"{wrapper}model.norm"), head=f"{wrapper}lm_head.weight"
    )
    vision = towers.llama4(config, shape.hidden) if nested and config.has("vision_config") else []
    return described_spec(config, text, shape, name=name, family="llama4", decoder=described, towers=vision)


def _rotates(text: Config, layers: int) -> list[bool]:
    """In `no_rope_layers` a 1 means that the layer does have rotary positions."""
    interval = text.integer("no_rope_layer_interval", 4)
    listed = text.integers("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(listed) != layers:
        raise text.wrong_type("no_rope_layers", f"a list of {layers} entries, one per layer")
    return [bool(rotates) for rotates in listed]


def _kinds(text: Config, rotates: list[bool]) -> tuple[str, ...]:
    """Older configs leave it to who rotates."""
    # A null chunk size means that nothing is chunked.
    chunks = text.fields.get("attention_chunk_size", 0) is not None
    return text.layer_types(len(rotates), (FULL, CHUNKED), (CHUNKED if chunks and r else FULL for r in rotates))


def _moe_layers(text: Config, layers: int) -> frozenset[int]:
    listed = text.integers("moe_layers")
    if listed is not None:
        return frozenset(listed)
    step = text.integer("interleave_moe_layer_step", 1)
    return frozenset(range(step - 1, layers, step))


def _experts(text: Config, shape: Shape, at: str, layer: int, activation: str) -> Mixer:
    """The shared expert is as wide as a routed one."""
    count, width = text.integer("num_local_experts", 16), text.integer("intermediate_size")
    chosen = experts_per_token(text, count, default=1)
    router = Router(whole(f"{at}router.weight", count, shape.hidden), chosen, CHOSEN_SIGMOID)
    tensors = fused_experts(f"{at}experts.", count, shape.hidden, width, transposed=True)
    routed = experts(layer, router, tensors, activation, weighs_inputs=True)
    return beside(routed, gated_mlp(f"{at}shared_expert.", shape, width, activation))
