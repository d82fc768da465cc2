"""Qwen2 and 2.5 and MiMo (biases of q, k and v), Qwen3 (normed queries and keys), dense and with experts, and the text
part of Qwen2-VL, 2.5-VL and 3-VL.

Positions of text are the same in all three parts of a multimodal rotation, so text rotates as in the models without
vision.
"""

from __future__ import annotations

from dataclasses import replace

from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config
from windowpane.models.parts import (
    FULL,
    SLIDING,
    attention_tensors,
    embeddings,
    even_head_dim,
    experts_per_token,
    fused_experts,
    mlp_tensors,
    model_spec,
    mtp_notes,
    norms,
    read_shape,
    retention,
    separate_experts,
    sparse_layers,
    whole,
)
from windowpane.models.rope import DEFAULT, read_rope
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

QWEN2 = (
    "Qwen2ForCausalLM",
    "MiMoForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)
VISION, VISION_EXPERTS = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"
WITH_EXPERTS = ("Qwen3MoeForCausalLM", VISION_EXPERTS)
SEEING = (*QWEN2[2:], VISION)
ARCHITECTURES = (*QWEN2, "Qwen3ForCausalLM", VISION, *WITH_EXPERTS)
DEFAULT_WINDOW = 4096


def read(config: Config, name: str) -> ModelSpec:
    architecture = (config.texts("architectures") or ("",))[0]
    text = config.section("text_config") if config.has("text_config") else config
    prefix = "model.language_model." if architecture in (VISION, VISION_EXPERTS) else "model."
    if architecture in WITH_EXPERTS:
        return _read_experts(config, text, name, prefix, fused=architecture == VISION_EXPERTS)
    is_qwen2 = architecture in QWEN2
    defaults = {"head_dim": even_head_dim(text)} if is_qwen2 else None
    shape = read_shape(config, text, tied=False, defaults=defaults)
    block_norms = Norms(shape.hidden, text.number("rms_norm_eps", 1e-6))
    width, activation = text.integer("intermediate_size"), text.text("hidden_act") or "silu"
    rope, has_bias = read_rope(text, shape.head_dim, shape.max_position), text.flag("attention_bias", False)
    if rope.kind == "mrope" and architecture in SEEING:
        rope = replace(rope, kind=DEFAULT)  # of text, all three positions are the same
    layers = []
    for layer, kind in enumerate(_kinds(text, shape.layers, text.integer("max_window_layers", 28, minimum=0))):
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
        layers.append(block_norms.pre(at, mixer, gated_mlp(f"{at}mlp.", shape, width, activation)))
    described = decoder(prefix, shape, layers, block_norms(f"{prefix}norm"))
    notes = mtp_notes(text)
    return described_spec(config, text, shape, name=name, family="qwen3", decoder=described, notes=notes)


def _read_experts(config: Config, text: Config, name: str, prefix: str, *, fused: bool) -> ModelSpec:
    """Qwen3 with experts, which can be planned only; `fused` ones are stored in one tensor, input-first."""
    shape = read_shape(config, text, tied=False, defaults={"head_dim": even_head_dim(text)})
    sparse = sparse_layers(text, shape.layers)
    # transformers knows both names, and saved configs have either.
    renamed = text.has("num_local_experts") and not text.has("num_experts")
    experts = text.integer("num_local_experts" if renamed else "num_experts")
    bias = text.flag("attention_bias", False)
    caches = []
    tensors: list[TensorSpec] = embeddings(prefix, shape)
    for layer, kind in enumerate(_kinds(text, shape.layers, first_sliding=0)):
        at = f"{prefix}layers.{layer}."
        caches.append(shape.cache(layer, retention(kind, text, DEFAULT_WINDOW)))
        tensors += attention_tensors(f"{at}self_attn.", shape, bias=bias, qk_norm=True)
        if layer in sparse:
            width = text.integer("moe_intermediate_size")
            tensors.append(whole(f"{at}mlp.gate.weight", experts, shape.hidden))
            if fused:
                tensors += fused_experts(f"{at}mlp.experts.", experts, shape.hidden, width, transposed=True)
            else:
                tensors += separate_experts(f"{at}mlp.experts.", experts, shape.hidden, width)
        else:
            tensors += mlp_tensors(f"{at}mlp.", shape.hidden, text.integer("intermediate_size"))
        tensors += norms(at, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms(prefix, ("norm",), shape.hidden)
    widest = _widest(text, shape.layers, sparse, experts)
    return model_spec(config, text, shape, name=name, family="qwen3", widest_mlp=widest, caches=caches, tensors=tensors)


def _kinds(config: Config, layers: int, first_sliding: int) -> tuple[str, ...]:
    """Windows need `use_sliding_window`: then dense models slide from `max_window_layers` on, MoE models everywhere."""
    slides = (
        config.flag("use_sliding_window", False) and config.fields.get("sliding_window", DEFAULT_WINDOW) is not None
    )
    rule = (SLIDING if slides and layer >= first_sliding else FULL for layer in range(layers))
    return config.layer_types(layers, (FULL, SLIDING), rule)


def _widest(config: Config, layers: int, sparse: frozenset[int], experts: int) -> int:
    widths = [config.integer("intermediate_size")] if len(sparse) < layers else []
    if sparse:
        widths.append(experts_per_token(config, experts) * config.integer("moe_intermediate_size"))
    return max(widths)
