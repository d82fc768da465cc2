"""Gemma 3n: sliding and full layers, the last of which share KV, per-layer embeddings and parallel residual streams."""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.models.blocks import tensors_of
from windowpane.models.building import Norms, per_layer_inputs
from windowpane.models.config import Config, every
from windowpane.models.families import towers
from windowpane.models.parts import (
    FULL,
    SANDWICH_NORMS,
    SLIDING,
    Shape,
    attention_tensors,
    embeddings,
    first_kv_shared_layer,
    mlp_tensors,
    model_spec,
    norms,
    read_shape,
    retention,
    whole,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

ARCHITECTURES = ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")

DEFAULTS = {
    "vocab_size": 262_400,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
}
VISION_NOTE = "the vision tower is defined by timm, not by the config; parameter counts leave it out"


def read(config: Config, name: str) -> ModelSpec:
    nested = config.has("text_config")
    text = config.section("text_config") if nested else config
    shape = read_shape(config, text, tied=True, defaults=DEFAULTS)
    kinds = text.layer_types(shape.layers, (FULL, SLIDING), every(5, FULL, SLIDING, shape.layers))
    widths = _mlp_widths(text, shape.layers)
    first_shared = first_kv_shared_layer(text, shape.layers, 15)
    prefix = "model.language_model." if nested else "model."
    caches: list[TokenCache] = []
    shared: list[TokenCache] = []
    tensors: list[TensorSpec] = embeddings(prefix, shape)
    for layer, kind in enumerate(kinds):
        owns_kv = layer < first_shared
        keeps = retention(kind, text, 512)
        cache = shape.cache(layer, keeps)
        (caches if owns_kv else shared).append(cache)
        layer_prefix = f"{prefix}layers.{layer}."
        bias = text.flag("attention_bias", False)
        tensors += attention_tensors(f"{layer_prefix}self_attn.", shape, bias=bias, qk_norm=True, owns_kv=owns_kv)
        tensors += mlp_tensors(f"{layer_prefix}mlp.", shape.hidden, widths[layer])
        tensors += norms(layer_prefix, SANDWICH_NORMS, shape.hidden)
        tensors += _residual_streams(layer_prefix, text, shape)
    tensors += norms(prefix, ("norm",), shape.hidden)
    vocab = text.integer("vocab_size_per_layer_input", 262_144)
    width = text.integer("hidden_size_per_layer_input", 256)
    tensors += tensors_of(per_layer_inputs(prefix, shape, vocab, width, Norms(shape.hidden, 1e-6), "")).values()
    tensors += _stream_projections(prefix, text, shape)
    if nested:
        tensors += towers.gemma3n(config, shape.hidden)
    return model_spec(
        config,
        text,
        shape,
        name=name,
        family="gemma3n",
        widest_mlp=max(widths),
        caches=caches,
        tensors=tensors,
        shared_caches=shared,
        notes=(VISION_NOTE,) if config.has("vision_config") else (),
    )


def _mlp_widths(text: Config, layers: int) -> tuple[int, ...]:
    """`intermediate_size` is one width, or one per layer."""
    if isinstance(text.fields.get("intermediate_size"), list):
        return text.integers("intermediate_size", layers) or ()
    return (text.integer("intermediate_size"),) * layers


def _residual_streams(prefix: str, text: Config, shape: Shape) -> list[TensorSpec]:
    """AltUp, which predicts and corrects the parallel streams, and LAuReL, a low-rank residual."""
    streams, rank = text.integer("altup_num_inputs", 4), text.integer("laurel_rank", 64)
    tensors = [
        whole(f"{prefix}altup.correction_coefs.weight", streams, streams),
        whole(f"{prefix}altup.prediction_coefs.weight", streams * streams, streams),
        whole(f"{prefix}altup.modality_router.weight", streams, shape.hidden),
        whole(f"{prefix}altup.router_norm.weight", shape.hidden),
        whole(f"{prefix}laurel.linear_left.weight", rank, shape.hidden, linear=True),
        whole(f"{prefix}laurel.linear_right.weight", shape.hidden, rank, linear=True),
        whole(f"{prefix}laurel.post_laurel_norm.weight", shape.hidden),
    ]
    if text.flag("altup_correct_scale", True):
        tensors.append(whole(f"{prefix}altup.correct_output_scale", shape.hidden))
    return tensors


def _stream_projections(prefix: str, text: Config, shape: Shape) -> list[TensorSpec]:
    extra_streams = range(text.integer("altup_num_inputs", 4) - 1)
    return [
        whole(f"{prefix}{kind}.{stream}.weight", shape.hidden, shape.hidden, linear=True)
        for kind in ("altup_projections", "altup_unembed_projections")
        for stream in extra_streams
    ]
