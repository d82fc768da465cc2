"""Qwen3, dense and with experts."""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.models.config import Config
from windowpane.models.parts import (
    FULL,
    SLIDING,
    attention,
    embeddings,
    even_head_dim,
    mlp,
    model_spec,
    norms,
    read_shape,
    retention,
    separate_experts,
    sparse_layers,
    whole,
)
from windowpane.models.spec import ModelSpec, TensorSpec

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
DEFAULT_WINDOW = 4096


def read(config: Config, name: str) -> ModelSpec:
    has_experts = config.texts("architectures") == ("Qwen3MoeForCausalLM",)
    shape = read_shape(
        config, config, tied=False, defaults={"head_dim": even_head_dim(config)} if has_experts else None
    )
    sparse = sparse_layers(config, shape.layers) if has_experts else frozenset()
    bias = config.flag("attention_bias", False)
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, kind in enumerate(_kinds(config, shape.layers, has_experts)):
        prefix = f"model.layers.{layer}."
        keeps = retention(kind, config, DEFAULT_WINDOW)
        caches.append(TokenCache(layer, keeps, shape.kv_heads, shape.head_dim, shape.head_dim))
        tensors += attention(f"{prefix}self_attn.", shape, bias=bias, qk_norm=True)
        if layer in sparse:
            tensors += _experts(f"{prefix}mlp.", config, shape.hidden)
        else:
            tensors += mlp(f"{prefix}mlp.", shape.hidden, config.integer("intermediate_size"))
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="qwen3",
        widest_mlp=_widest(config, shape.layers, sparse),
        caches=caches,
        tensors=tensors,
    )


def _kinds(config: Config, layers: int, has_experts: bool) -> tuple[str, ...]:
    """Windows need `use_sliding_window`: then dense models slide from `max_window_layers` on, MoE models everywhere."""
    slides = (
        config.flag("use_sliding_window", False) and config.fields.get("sliding_window", DEFAULT_WINDOW) is not None
    )
    first_sliding = 0 if has_experts else config.integer("max_window_layers", 28, minimum=0)
    rule = (SLIDING if slides and layer >= first_sliding else FULL for layer in range(layers))
    return config.layer_types(layers, (FULL, SLIDING), rule)


def _experts(prefix: str, config: Config, hidden: int) -> list[TensorSpec]:
    # transformers knows both names, and saved configs have either.
    renamed = config.has("num_local_experts") and not config.has("num_experts")
    experts = config.integer("num_local_experts" if renamed else "num_experts")
    return [
        whole(f"{prefix}gate.weight", experts, hidden),
        *separate_experts(f"{prefix}experts.", experts, hidden, config.integer("moe_intermediate_size")),
    ]


def _widest(config: Config, layers: int, sparse: frozenset[int]) -> int:
    widths = [config.integer("intermediate_size")] if len(sparse) < layers else []
    if sparse:
        widths.append(config.integer("num_experts_per_tok") * config.integer("moe_intermediate_size"))
    return max(widths)
