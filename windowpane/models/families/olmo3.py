"""OLMo 3 and EXAONE 4: three sliding layers to a full one, normed queries and keys, norms only after each block."""

from __future__ import annotations

from collections.abc import Iterable

from windowpane.kv.caches import TokenCache
from windowpane.models.config import Config, every
from windowpane.models.parts import (
    FULL,
    SLIDING,
    Shape,
    attention,
    embeddings,
    even_head_dim,
    mlp,
    model_spec,
    norms,
    read_shape,
    retention,
)
from windowpane.models.spec import ModelError, ModelSpec, Shard, TensorSpec

ARCHITECTURES = ("Olmo3ForCausalLM", "Exaone4ForCausalLM")
DEFAULT_WINDOW = 4096
PATTERN_LETTERS = {"L": SLIDING, "G": FULL}


def read(config: Config, name: str) -> ModelSpec:
    is_olmo = config.texts("architectures") == ("Olmo3ForCausalLM",)
    defaults = {"head_dim": even_head_dim(config), "num_key_value_heads": config.integer("num_attention_heads")}
    shape = read_shape(config, config, tied=False, defaults=defaults)
    rule = every(4, FULL, SLIDING, shape.layers) if is_olmo else _exaone_rule(config, shape.layers)
    kinds = config.layer_types(shape.layers, (FULL, SLIDING), rule)
    width = config.integer("intermediate_size")
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        keeps = retention(kind, config, DEFAULT_WINDOW)
        caches.append(TokenCache(layer, keeps, shape.kv_heads, shape.head_dim, shape.head_dim))
        if is_olmo:
            tensors += attention(f"{prefix}self_attn.", shape, bias=config.flag("attention_bias", False))
            tensors += _wide_norms(f"{prefix}self_attn.", shape)
        else:
            tensors += attention(f"{prefix}self_attn.", shape, qk_norm=True)
        tensors += mlp(f"{prefix}mlp.", shape.hidden, width)
        tensors += norms(prefix, ("post_attention_layernorm", "post_feedforward_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    return model_spec(
        config, config, shape, name=name, family="olmo3", widest_mlp=width, caches=caches, tensors=tensors
    )


def _wide_norms(prefix: str, shape: Shape) -> list[TensorSpec]:
    """OLMo norms all heads of a token together, so that the weight is as wide as the projection."""
    return [
        TensorSpec(f"{prefix}{name}.weight", (heads * shape.head_dim,), Shard(0, ((heads * shape.head_dim, heads),)))
        for name, heads in (("q_norm", shape.query_heads), ("k_norm", shape.kv_heads))
    ]


def _exaone_rule(config: Config, layers: int) -> Iterable[str]:
    """A number (every n-th layer is full), letters that repeat (the last layer is full), or no window at all."""
    if config.fields.get("sliding_window", DEFAULT_WINDOW) is None:
        return (FULL,) * layers
    pattern = config.fields.get("sliding_window_pattern", 4)
    if not isinstance(pattern, str):
        return every(config.integer("sliding_window_pattern", 4), FULL, SLIDING, layers)
    if not pattern or not set(pattern) <= PATTERN_LETTERS.keys():
        raise ModelError(f"{config.where}sliding_window_pattern must be letters L and G, not {pattern!r}")
    kinds = [PATTERN_LETTERS[pattern[layer % len(pattern)]] for layer in range(layers)]
    return (*kinds[:-1], FULL)
