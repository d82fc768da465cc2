"""Llama-Nemotron (nemotron-nas, DeciLM): Llama's layers after a search, each with KV heads and an MLP of its own size.

Attention and MLP may also be left out (`no_op`), or be one matrix (`replace_with_linear`) that keeps nothing.
"""

from __future__ import annotations

from dataclasses import replace

from windowpane.kv.caches import TokenCache
from windowpane.kv.retention import Full, TokenRetention, Window, ceil_div
from windowpane.models.config import Config, ModelError
from windowpane.models.parts import (
    Shape,
    attention_tensors,
    embeddings,
    even_head_dim,
    mlp_tensors,
    model_spec,
    norms,
    read_shape,
    whole,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

ARCHITECTURES = ("DeciLMForCausalLM",)


def read(config: Config, name: str) -> ModelSpec:
    # Where the config has a number of KV heads too, it is that of no layer in particular.
    heads = config.integer("num_attention_heads")
    plain = Config({**config.fields, "num_key_value_heads": heads})
    shape = read_shape(plain, plain, tied=False, defaults={"head_dim": even_head_dim(config)})
    blocks = _blocks(config, shape.layers)
    caches: list[TokenCache] = []
    widths: list[int] = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, block in enumerate(blocks):
        prefix, attends, feeds = f"model.layers.{layer}.", block.section("attention"), block.section("ffn")
        if attends.flag("replace_with_linear", False):
            tensors.append(_linear(f"{prefix}self_attn.linear_attn.weight", shape))
        elif not attends.flag("no_op", False):
            kv_heads = _kv_heads(attends, heads)
            caches.append(TokenCache(layer, _retention(attends), kv_heads, shape.head_dim, shape.head_dim))
            sized = replace(shape, kv_heads=kv_heads)
            tensors += attention_tensors(f"{prefix}self_attn.", sized, bias=config.flag("attention_bias", False))
        if feeds.flag("replace_with_linear", False):
            tensors.append(_linear(f"{prefix}mlp.linear_mlp.weight", shape))
        elif not feeds.flag("no_op", False):
            widths.append(_width(feeds, shape.hidden))
            tensors += mlp_tensors(f"{prefix}mlp.", shape.hidden, widths[-1], bias=config.flag("mlp_bias", False))
        kept = {"input_layernorm": attends, "post_attention_layernorm": feeds}
        tensors += norms(prefix, (n for n, part in kept.items() if not part.flag("no_op", False)), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    if not caches:
        raise ModelError("block_configs: no layer has attention, so there is nothing to keep for later tokens")
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="nemotron_nas",
        widest_mlp=max(widths, default=shape.hidden),
        caches=caches,
        tensors=tensors,
        planned_only="its layers differ in KV heads and MLPs, and some have no attention",
    )


def _blocks(config: Config, layers: int) -> list[Config]:
    listed = config.fields.get("block_configs")
    if not isinstance(listed, list) or not all(isinstance(block, dict) for block in listed):
        raise ModelError("the config has no list block_configs, so its layers are unknown")
    if len(listed) != layers:
        raise ModelError(f"block_configs has {len(listed)} entries for {layers} layers")
    return [Config(block, f"block_configs[{layer}].") for layer, block in enumerate(listed)]


def _kv_heads(attends: Config, query_heads: int) -> int:
    group = attends.integer("n_heads_in_group")
    if query_heads % group:
        raise ModelError(f"{attends.where}n_heads_in_group is {group}, which does not divide {query_heads} query heads")
    return query_heads // group


def _retention(attends: Config) -> TokenRetention:
    for key in ("sparsify", "num_sink_tokens"):
        if attends.has(key):
            raise ModelError(f"{attends.where}{key} is {attends.fields[key]!r:.40}; known: null")
    return Window(attends.integer("window_length")) if attends.has("window_length") else Full()


def _width(feeds: Config, hidden: int) -> int:
    """The multiplier is that of an MLP without a gate; with one, two thirds of it, rounded up to 256."""
    if feeds.has("sparsify"):
        raise ModelError(f"{feeds.where}sparsify is {feeds.fields['sparsify']!r:.40}; known: null")
    if feeds.has("intermediate_size"):
        return feeds.integer("intermediate_size")
    if (multiplier := feeds.number("ffn_mult")) <= 0:
        raise ModelError(f"{feeds.where}ffn_mult is {multiplier:g}, but must be above 0")
    return ceil_div(int(2 * multiplier * hidden / 3), 256) * 256


def _linear(name: str, shape: Shape) -> TensorSpec:
    return whole(name, shape.hidden, shape.hidden, part="other", linear=True)
