"""Qwen2 and 2.5 (biases of q, k and v), and Qwen3 (normed queries and keys), dense and with experts."""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config
from windowpane.models.parts import (
    FULL,
    SLIDING,
    Shape,
    attention_tensors,
    embeddings,
    even_head_dim,
    mlp_tensors,
    model_spec,
    norms,
    read_shape,
    retention,
    separate_experts,
    sparse_layers,
    whole,
)
from windowpane.models.rope import read_rope
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

QWEN2, WITH_EXPERTS = "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"
ARCHITECTURES = (QWEN2, "Qwen3ForCausalLM", WITH_EXPERTS)
DEFAULT_WINDOW = 4096


def read(config: Config, name: str) -> ModelSpec:
    architecture = (config.texts("architectures") or ("",))[0]
    if architecture == WITH_EXPERTS:
        return _read_experts(config, name)
    is_qwen2 = architecture == QWEN2
    shape = read_shape(config, config, tied=False, defaults={"head_dim": even_head_dim(config)} if is_qwen2 else None)
    rope = read_rope(config, shape.head_dim, shape.max_position)
    block_norms = Norms(shape.hidden, config.number("rms_norm_eps", 1e-6))
    width, activation = config.integer("intermediate_size"), config.text("hidden_act") or "silu"
    has_bias = config.flag("attention_bias", False)
    layers = []
    for layer, kind in enumerate(_kinds(config, shape.layers, config.integer("max_window_layers", 28, minimum=0))):
        prefix = f"model.layers.{layer}."
        keeps = retention(kind, config, DEFAULT_WINDOW)
        mixer = attention(
            f"{prefix}self_attn.",
            shape,
            TokenCache(layer, keeps, shape.kv_heads, shape.head_dim, shape.head_dim),
            rope=rope,
            tensors=_attention_tensors(f"{prefix}self_attn.", shape, q_k_v=is_qwen2 or has_bias, out=has_bias),
            head_norms=None if is_qwen2 else block_norms.of_heads(shape.head_dim),
        )
        layers.append(block_norms.pre(prefix, mixer, gated_mlp(f"{prefix}mlp.", shape, width, activation)))
    described = decoder("model.", shape, layers, block_norms("model.norm"))
    return described_spec(config, config, shape, name=name, family="qwen3", decoder=described)


def _attention_tensors(prefix: str, shape: Shape, *, q_k_v: bool, out: bool) -> list[TensorSpec]:
    tensors = attention_tensors(prefix, shape, bias=q_k_v)
    return tensors if out or not q_k_v else tensors[:-1]


def _read_experts(config: Config, name: str) -> ModelSpec:
    """Qwen3 with experts, which can be planned only."""
    shape = read_shape(config, config, tied=False, defaults={"head_dim": even_head_dim(config)})
    sparse = sparse_layers(config, shape.layers)
    bias = config.flag("attention_bias", False)
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, kind in enumerate(_kinds(config, shape.layers, first_sliding=0)):
        prefix = f"model.layers.{layer}."
        keeps = retention(kind, config, DEFAULT_WINDOW)
        caches.append(TokenCache(layer, keeps, shape.kv_heads, shape.head_dim, shape.head_dim))
        tensors += attention_tensors(f"{prefix}self_attn.", shape, bias=bias, qk_norm=True)
        if layer in sparse:
            tensors += _experts(f"{prefix}mlp.", config, shape.hidden)
        else:
            tensors += mlp_tensors(f"{prefix}mlp.", shape.hidden, config.integer("intermediate_size"))
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    widest = _widest(config, shape.layers, sparse)
    return model_spec(
        config, config, shape, name=name, family="qwen3", widest_mlp=widest, caches=caches, tensors=tensors
    )


def _kinds(config: Config, layers: int, first_sliding: int) -> tuple[str, ...]:
    """Windows need `use_sliding_window`: then dense models slide from `max_window_layers` on, MoE models everywhere."""
    slides = (
        config.flag("use_sliding_window", False) and config.fields.get("sliding_window", DEFAULT_WINDOW) is not None
    )
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
