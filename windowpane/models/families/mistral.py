"""Mistral, Ministral and Mistral Small: Llama's layers, with one sliding window for all layers or none.

Of Mistral 3 and Ministral 3 the text part is read. Ministral 3 scales queries by position, which no lowering does.
"""

from __future__ import annotations

from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config
from windowpane.models.parts import FULL, SLIDING, even_head_dim, read_shape, retention
from windowpane.models.rope import read_rope
from windowpane.models.spec import ModelSpec

MULTIMODAL, MINISTRAL3 = "Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"
ARCHITECTURES = ("MistralForCausalLM", "MinistralForCausalLM", MULTIMODAL, MINISTRAL3)
DEFAULT_WINDOW = 4096


def read(config: Config, name: str) -> ModelSpec:
    nested = config.texts("architectures") == (MULTIMODAL,)
    text = config.section("text_config") if nested else config
    kind = text.choice("model_type", ("mistral", "ministral3")) if nested else None
    is_ministral3 = kind == "ministral3" or config.texts("architectures") == (MINISTRAL3,)
    shape = read_shape(config, text, tied=False, defaults={"head_dim": even_head_dim(text)})
    # A null window means that every layer is full; the class's own default is a window, but in Ministral 3.
    default_window = None if is_ministral3 else DEFAULT_WINDOW
    uniform = SLIDING if text.fields.get("sliding_window", default_window) is not None else FULL
    kinds = text.layer_types(shape.layers, (FULL, SLIDING), (uniform,) * shape.layers)
    rope = read_rope(text, shape.head_dim, shape.max_position)
    norms = Norms(shape.hidden, text.number("rms_norm_eps", 1e-5 if is_ministral3 else 1e-6))
    width, activation = text.integer("intermediate_size"), text.text("hidden_act") or "silu"
    wrapper = "language_model." if nested else ""
    layers = []
    for layer, kind in enumerate(kinds):
        prefix = f"{wrapper}model.layers.{layer}."
        cache = shape.cache(layer, retention(kind, text, default_window))
        mixer = attention(f"{prefix}self_attn.", shape, cache, rope=rope)
        layers.append(norms.pre(prefix, mixer, gated_mlp(f"{prefix}mlp.", shape, width, activation)))
    described = decoder(
        f"{wrapper}model.", shape, layers, norms(f"{wrapper}model.norm"), head=f"{wrapper}lm_head.weight"
    )
    planned_only = _scaled_queries(text) if is_ministral3 else ""
    return described_spec(
        config, text, shape, name=name, family="mistral", decoder=described, planned_only=planned_only
    )


def _scaled_queries(text: Config) -> str:
    """Why Ministral 3 does not run: the class scales queries unless the config says otherwise."""
    rope = text.section("rope_parameters") if text.has("rope_parameters") else Config({"llama_4_scaling_beta": 0.1})
    return (
        "its queries are scaled by their position (llama_4_scaling_beta)"
        if rope.number("llama_4_scaling_beta", 0)
        else ""
    )
