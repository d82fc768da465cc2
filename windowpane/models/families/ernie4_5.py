"""ERNIE 4.5: Llama's layers whose rotation pairs neighbouring dims; the larger models have experts in most layers."""

from __future__ import annotations

from windowpane.kv.retention import Full
from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config
from windowpane.models.parts import (
    Shape,
    attention_tensors,
    embeddings,
    even_head_dim,
    experts_per_token,
    mlp_tensors,
    model_spec,
    mtp_notes,
    norms,
    read_shape,
    separate_experts,
    whole,
)
from windowpane.models.rope import read_rope
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

WITH_EXPERTS = "Ernie4_5_MoeForCausalLM"
# The second name is that of the first releases.
ARCHITECTURES = ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", WITH_EXPERTS)


def read(config: Config, name: str) -> ModelSpec:
    if config.texts("architectures") == (WITH_EXPERTS,):
        return _read_experts(config, name)
    shape = read_shape(config, config, tied=True, defaults={"head_dim": 128})
    rope = read_rope(config, shape.head_dim, shape.max_position, 5e5).with_interleaved_pairs()
    block_norms = Norms(shape.hidden, config.number("rms_norm_eps", 1e-5))
    width, activation = config.integer("intermediate_size"), config.text("hidden_act") or "silu"
    bias = config.flag("use_bias", False)
    layers = []
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        cache = shape.cache(layer, Full())
        mixer = attention(f"{prefix}self_attn.", shape, cache, rope=rope, bias=bias)
        mlp = gated_mlp(f"{prefix}mlp.", shape, width, activation, bias=bias)
        layers.append(block_norms.pre(prefix, mixer, mlp))
    described = decoder("model.", shape, layers, block_norms("model.norm"))
    return described_spec(config, config, shape, name=name, family="ernie4_5", decoder=described)


def _read_experts(config: Config, name: str) -> ModelSpec:
    shape = read_shape(config, config, tied=True, defaults={"head_dim": even_head_dim(config)})
    sparse = _sparse_layers(config, shape.layers)
    bias = config.flag("use_bias", False)
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        caches.append(shape.cache(layer, Full()))
        tensors += attention_tensors(f"{prefix}self_attn.", shape, bias=bias)
        if layer in sparse:
            tensors += _experts(f"{prefix}mlp.", config, shape, bias)
        else:
            tensors += mlp_tensors(f"{prefix}mlp.", shape.hidden, config.integer("intermediate_size"), bias=bias)
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    visited = experts_per_token(config, config.integer("moe_num_experts"), "moe_k", 6) + _shared(config)
    dense_width = config.integer("intermediate_size") if len(sparse) < shape.layers else 0
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="ernie4_5",
        widest_mlp=max(dense_width, visited * config.integer("moe_intermediate_size") if sparse else 0),
        caches=caches,
        tensors=tensors,
        notes=mtp_notes(config),
    )


def _sparse_layers(config: Config, layers: int) -> frozenset[int]:
    """Every `moe_layer_interval`-th layer from the first index to the last, of which -1 is the last layer."""
    first, last = config.integer("moe_layer_start_index", 1, minimum=0), config.integer("moe_layer_end_index", -1, -1)
    interval = config.integer("moe_layer_interval", 1)
    last = layers - 1 if last < 0 else last
    return frozenset(layer for layer in range(layers) if (layer + 1) % interval == 0 and first <= layer <= last)


def _shared(config: Config) -> int:
    return config.integer("moe_num_shared_experts", 2, minimum=0)


def _experts(prefix: str, config: Config, shape: Shape, bias: bool) -> list[TensorSpec]:
    experts, width = config.integer("moe_num_experts"), config.integer("moe_intermediate_size")
    shared = mlp_tensors(f"{prefix}shared_experts.", shape.hidden, _shared(config) * width, bias=bias)
    return [
        whole(f"{prefix}gate.weight", experts, shape.hidden),
        whole(f"{prefix}moe_statics.e_score_correction_bias", 1, experts),
        *separate_experts(f"{prefix}experts.", experts, shape.hidden, width),
        *(shared if _shared(config) else ()),
    ]
