"""MiMo-V2-Flash: five sliding layers to a full one, K wider than V, sinks in sliding layers, and experts."""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.kv.retention import Full, Window
from windowpane.models.config import Config, ModelError
from windowpane.models.parts import (
    DENSE,
    FULL,
    SLIDING,
    SPARSE,
    by_columns,
    by_rows,
    embeddings,
    experts_per_token,
    listed_sparse,
    mlp_tensors,
    model_spec,
    norms,
    read_shape,
    separate_experts,
    whole,
    with_biases,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = ("MiMoV2FlashForCausalLM",)


def read(config: Config, name: str) -> ModelSpec:
    shape = read_shape(config, config, tied=False, defaults={"head_dim": 192})
    layers, value_dim = shape.layers, config.integer("v_head_dim", 128)
    _check_sliding_heads(config, shape.query_heads, shape.head_dim, value_dim)
    rule = tuple(FULL if layer == 0 or (layer + 1) % 6 == 0 else SLIDING for layer in range(layers))
    kinds = config.layer_types(
        layers, (FULL, SLIDING), _flags(config, "hybrid_layer_pattern", layers, FULL, SLIDING) or rule
    )
    sparse = _sparse_layers(config, layers)
    experts, width = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    kv_heads = {FULL: shape.kv_heads, SLIDING: config.integer("swa_num_key_value_heads", 2 * shape.kv_heads)}
    has_sinks = {
        FULL: config.flag("add_full_attention_sink_bias", False),
        SLIDING: config.flag("add_swa_attention_sink_bias", True),
    }
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, kind in enumerate(kinds):
        prefix, heads, dim = f"model.layers.{layer}.", shape.query_heads, shape.head_dim
        keeps = Full() if kind == FULL else Window(_window(config))
        caches.append(TokenCache(layer, keeps, kv_heads[kind], dim, value_dim))
        sizes = {"q": (heads, dim), "k": (kv_heads[kind], dim), "v": (kv_heads[kind], value_dim)}
        qkv = [
            by_rows(f"{prefix}self_attn.{which}_proj.weight", count * size, shape.hidden, count, "attention")
            for which, (count, size) in sizes.items()
        ]
        tensors += with_biases(qkv) if config.flag("attention_bias", False) else qkv
        tensors.append(
            by_columns(f"{prefix}self_attn.o_proj.weight", shape.hidden, heads * value_dim, heads, "attention")
        )
        if has_sinks[kind]:
            per_head = Shard(0, ((heads, heads),))
            tensors.append(TensorSpec(f"{prefix}self_attn.attention_sink_bias", (heads,), per_head, part="attention"))
        if layer in sparse:
            tensors.append(whole(f"{prefix}mlp.gate.weight", experts, shape.hidden))
            tensors.append(whole(f"{prefix}mlp.gate.e_score_correction_bias", experts))
            tensors += separate_experts(f"{prefix}mlp.experts.", experts, shape.hidden, width)
        else:
            tensors += mlp_tensors(f"{prefix}mlp.", shape.hidden, config.integer("intermediate_size"))
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    dense_width = config.integer("intermediate_size") if len(sparse) < layers else 0
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="mimo_v2",
        widest_mlp=max(dense_width, experts_per_token(config, experts) * width if sparse else 0),
        caches=caches,
        tensors=tensors,
    )


def _check_sliding_heads(config: Config, query_heads: int, head_dim: int, value_dim: int) -> None:
    """Released models differ between sliding and full layers in their KV heads alone; shared experts have none."""
    expected = {"swa_num_attention_heads": query_heads, "swa_head_dim": head_dim, "swa_v_head_dim": value_dim}
    for key, size in expected.items():
        if config.integer(key, size) != size:
            raise ModelError(f"{key} is {config.integer(key)}; known is the size of full layers, {size}")
    if config.has("n_shared_experts"):
        raise ModelError(
            f"n_shared_experts is {config.integer('n_shared_experts')}; MiMo-V2 is known without any (null)"
        )


def _window(config: Config) -> int:
    """`sliding_window_size` counts the tokens before this one, as SGLang does; `sliding_window` counts it too."""
    if config.has("sliding_window_size"):
        return config.integer("sliding_window_size") + 1
    return config.integer("sliding_window", None if "sliding_window" in config.fields else 129)


def _flags(config: Config, key: str, layers: int, zero: str, one: str) -> tuple[str, ...] | None:
    """A list of 0 and 1, one for each layer, in words; None where the config has none."""
    flags = config.integers(key, layers)
    if flags is None:
        return None
    for flag in flags:
        if flag not in (0, 1):
            raise config.unknown_value(key, flag, ("0", "1"))
    return tuple(one if flag else zero for flag in flags)


def _sparse_layers(config: Config, layers: int) -> frozenset[int]:
    listed = listed_sparse(config, layers)
    if listed is not None:
        return listed
    kinds = _flags(config, "moe_layer_freq", layers, DENSE, SPARSE) or (DENSE, *(SPARSE,) * (layers - 1))
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == SPARSE)
