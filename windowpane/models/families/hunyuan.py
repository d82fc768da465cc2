"""Hunyuan v1, dense and with experts: Llama's layers, which norm queries and keys after rotating them."""

from __future__ import annotations

from windowpane.kv.retention import Full
from windowpane.models.config import Config, ModelError
from windowpane.models.parts import (
    attention_tensors,
    embeddings,
    even_head_dim,
    experts_per_token,
    mlp_tensors,
    model_spec,
    norms,
    read_shape,
    separate_experts,
    whole,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

WITH_EXPERTS = "HunYuanMoEV1ForCausalLM"
ARCHITECTURES = ("HunYuanDenseV1ForCausalLM", WITH_EXPERTS)


def read(config: Config, name: str) -> ModelSpec:
    has_experts = config.texts("architectures") == (WITH_EXPERTS,)
    if config.flag("use_cla", False):
        raise ModelError("use_cla is true: layers of Hunyuan v1 that share K and V with others are not known")
    defaults = {"head_dim": even_head_dim(config), "num_key_value_heads": config.integer("num_attention_heads")}
    shape = read_shape(config, config, tied=False, defaults=defaults)
    width, bias = config.integer("intermediate_size"), config.flag("attention_bias", False)
    experts = _same(config, "num_experts", shape.layers) if has_experts else 0
    shared = _same(config, "num_shared_expert", shape.layers, 1) if has_experts else 0
    expert_width = _same(config, "moe_intermediate_size", shape.layers, width) if has_experts else 0
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape, uneven=True)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        caches.append(shape.cache(layer, Full()))
        tensors += attention_tensors(f"{prefix}self_attn.", shape, bias=bias)
        tensors += norms(f"{prefix}self_attn.", ("query_layernorm", "key_layernorm"), shape.head_dim)
        if experts:
            tensors.append(whole(f"{prefix}mlp.gate.wg.weight", experts, shape.hidden))
            tensors += separate_experts(f"{prefix}mlp.experts.", experts, shape.hidden, expert_width)
            tensors += mlp_tensors(f"{prefix}mlp.shared_mlp.", shape.hidden, shared * width)
        else:
            tensors += mlp_tensors(f"{prefix}mlp.", shape.hidden, width)
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    widest = width
    if has_experts:
        visited = {"moe_topk": _same(config, "moe_topk", shape.layers)}
        widest = experts_per_token(Config(visited), experts, "moe_topk") * expert_width + shared * width
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="hunyuan",
        widest_mlp=widest,
        caches=caches,
        tensors=tensors,
        planned_only="it norms queries and keys after rotating them",
    )


def _same(config: Config, key: str, layers: int, default: int | None = None) -> int:
    """A size that configs give once or for each layer. One for all is known, so a list must say the same of each."""
    if not isinstance(config.fields.get(key), list):
        return config.integer(key, default)
    sizes = config.integers(key, layers) or ()
    if len(set(sizes)) != 1:
        raise ModelError(
            f"{config.where}{key} differs between layers ({min(sizes)} to {max(sizes)}); one size is known"
        )
    return Config({key: sizes[0]}, config.where).integer(key)
