"""Qwen2 and 2.5 and MiMo (biases of q, k and v), Qwen3 (normed queries and keys), dense and with experts, and the text
part of Qwen2-VL, 2.5-VL and 3-VL.

Positions of text are the same in all three parts of a multimodal rotation, so text rotates as in the models without
vision.
"""

from __future__ import annotations

from dataclasses import replace

from windowpane.models.blocks import Experts, Mixer, Router
from windowpane.models.building import Norms, attention, decoder, described_spec, experts, gated_mlp
from windowpane.models.config import Config, ModelError
from windowpane.models.parts import (
    FULL,
    SLIDING,
    Shape,
    even_head_dim,
    experts_per_token,
    fused_experts,
    mtp_notes,
    read_shape,
    retention,
    separate_experts,
    sparse_layers,
    whole,
)
from windowpane.models.rope import DEFAULT, read_rope
from windowpane.models.spec import ModelSpec

SEEING_QWEN2 = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
QWEN2 = ("Qwen2ForCausalLM", "MiMoForCausalLM", *SEEING_QWEN2)
VISION, VISION_EXPERTS = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"
WITH_EXPERTS = ("Qwen3MoeForCausalLM", VISION_EXPERTS)
SEEING = (*SEEING_QWEN2, VISION, VISION_EXPERTS)
ARCHITECTURES = (*QWEN2, "Qwen3ForCausalLM", VISION, *WITH_EXPERTS)
DEFAULT_WINDOW = 4096


def read(config: Config, name: str) -> ModelSpec:
    architecture = (config.texts("architectures") or ("",))[0]
    text = config.section("text_config") if config.has("text_config") else config
    prefix = "model.language_model." if architecture in (VISION, VISION_EXPERTS) else "model."
    is_qwen2, has_experts = architecture in QWEN2, architecture in WITH_EXPERTS
    defaults = {"head_dim": even_head_dim(text)} if is_qwen2 or has_experts else None
    shape = read_shape(config, text, tied=False, defaults=defaults)
    block_norms = Norms(shape.hidden, text.number("rms_norm_eps", 1e-5 if architecture in SEEING_QWEN2 else 1e-6))
    activation = text.text("hidden_act") or "silu"
    theta = 1e6 if architecture in SEEING_QWEN2 else 5e5 if architecture in SEEING else 1e4
    rope = read_rope(text, shape.head_dim, shape.max_position, theta=theta)
    has_bias = text.flag("attention_bias", False)
    if rope.kind == "mrope" and architecture in SEEING:
        rope = replace(rope, kind=DEFAULT)  # of text, all three positions are the same
    sparse = sparse_layers(text, shape.layers) if has_experts else frozenset()
    first_sliding = 0 if has_experts else text.integer("max_window_layers", 28, minimum=0)
    layers = []
    for layer, kind in enumerate(_kinds(text, shape.layers, first_sliding)):
        at = f"{prefix}layers.{layer}."
        mixer = attention(
            f"{at}self_attn.",
            shape,
            shape.cache(layer, retention(kind, text, DEFAULT_WINDOW)),
            rope=rope,
            bias=is_qwen2 or has_bias,
            out_bias=has_bias and not is_qwen2,
            head_norms=None if is_qwen2 else block_norms.of_heads(shape.head_dim),
        )
        if layer in sparse:
            mlp: Mixer = _experts(text, shape, f"{at}mlp.", layer, activation, fused=architecture == VISION_EXPERTS)
        else:
            mlp = gated_mlp(f"{at}mlp.", shape, text.integer("intermediate_size"), activation)
        layers.append(block_norms.pre(at, mixer, mlp))
    described = decoder(prefix, shape, layers, block_norms(f"{prefix}norm"))
    notes = mtp_notes(text)
    return described_spec(config, text, shape, name=name, family="qwen3", decoder=described, notes=notes)


def _experts(text: Config, shape: Shape, at: str, layer: int, activation: str, *, fused: bool) -> Experts:
    """`fused` ones are stored in one tensor, input-first."""
    # transformers knows both names, and saved configs have either.
    renamed = text.has("num_local_experts") and not text.has("num_experts")
    count = text.integer("num_local_experts" if renamed else "num_experts")
    width = text.integer("moe_intermediate_size")
    router = Router(
        whole(f"{at}gate.weight", count, shape.hidden),
        experts_per_token(text, count),
        renormalizes=fused or text.flag("norm_topk_prob", False),
    )
    sizes = f"{at}experts.", count, shape.hidden, width
    tensors = fused_experts(*sizes, transposed=True) if fused else separate_experts(*sizes)
    return experts(layer, router, tensors, activation)


def _kinds(config: Config, layers: int, first_sliding: int) -> tuple[str, ...]:
    """Windows need `use_sliding_window`: then dense models slide from `max_window_layers` on, MoE models everywhere."""
    slides = (
        config.flag("use_sliding_window", False) and config.fields.get("sliding_window", DEFAULT_WINDOW) is not None
    )
    rule = (SLIDING if slides and layer >= first_sliding else FULL for layer in range(layers))
    kinds = config.layer_types(layers, (FULL, SLIDING), rule)
    if SLIDING in kinds and not slides:
        raise ModelError(
            f"{config.where}layer_types has {SLIDING}, but windows are switched off; set use_sliding_window to true "
            f"and sliding_window to how far they see, or make these layers {FULL}"
        )
    return kinds
