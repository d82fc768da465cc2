"""Llama 4: layers with rotary positions see their own chunk, the others everything; experts in some or all layers."""

from __future__ import annotations

from windowpane.models.config import Config
from windowpane.models.families import towers
from windowpane.models.parts import (
    CHUNKED,
    FULL,
    attention_tensors,
    embeddings,
    experts_per_token,
    fused_experts,
    mlp_tensors,
    model_spec,
    norms,
    read_shape,
    retention,
    whole,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

ARCHITECTURES = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")

DEFAULTS = {
    "vocab_size": 202_048,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}


def read(config: Config, name: str) -> ModelSpec:
    nested = config.has("text_config")
    text = config.section("text_config") if nested else config
    shape = read_shape(config, text, tied=False, defaults=DEFAULTS)
    sparse = _moe_layers(text, shape.layers)
    dense_width = text.integer("intermediate_size_mlp", 16_384)
    bias = text.flag("attention_bias", False)
    wrapper = "language_model." if nested else ""
    caches = []
    tensors: list[TensorSpec] = embeddings(f"{wrapper}model.", shape, head=f"{wrapper}lm_head.weight")
    for layer, kind in enumerate(_kinds(text, shape.layers)):
        prefix = f"{wrapper}model.layers.{layer}."
        keeps = retention(kind, text, default_chunk=8192)
        caches.append(shape.cache(layer, keeps))
        tensors += attention_tensors(f"{prefix}self_attn.", shape, bias=bias)
        if layer in sparse:
            tensors += _experts(f"{prefix}feed_forward.", text, shape.hidden)
        else:
            tensors += mlp_tensors(f"{prefix}feed_forward.", shape.hidden, dense_width)
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms(f"{wrapper}model.", ("norm",), shape.hidden)
    if nested and config.has("vision_config"):
        tensors += towers.llama4(config, shape.hidden)
    return model_spec(
        config,
        text,
        shape,
        name=name,
        family="llama4",
        widest_mlp=_widest(text, shape.layers, sparse, dense_width),
        caches=caches,
        tensors=tensors,
    )


def _kinds(text: Config, layers: int) -> tuple[str, ...]:
    """Older configs say it with `no_rope_layers`, whose 1 means that the layer does have rotary positions."""
    interval = text.integer("no_rope_layer_interval", 4)
    has_rope = text.integers("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(has_rope) != layers:
        raise text.wrong_type("no_rope_layers", f"a list of {layers} entries, one per layer")
    # A null chunk size means that nothing is chunked.
    chunks = text.fields.get("attention_chunk_size", 0) is not None
    rule = (CHUNKED if chunks and rope else FULL for rope in has_rope)
    return text.layer_types(layers, (FULL, CHUNKED), rule)


def _moe_layers(text: Config, layers: int) -> frozenset[int]:
    listed = text.integers("moe_layers")
    if listed is not None:
        return frozenset(listed)
    step = text.integer("interleave_moe_layer_step", 1)
    return frozenset(range(step - 1, layers, step))


def _experts(prefix: str, text: Config, hidden: int) -> list[TensorSpec]:
    experts, width = text.integer("num_local_experts", 16), text.integer("intermediate_size")
    return [
        whole(f"{prefix}router.weight", experts, hidden),
        *fused_experts(f"{prefix}experts.", experts, hidden, width, transposed=True),
        *mlp_tensors(f"{prefix}shared_expert.", hidden, width),
    ]


def _widest(text: Config, layers: int, sparse: frozenset[int], dense_width: int) -> int:
    widths = [dense_width] if len(sparse) < layers else []
    if sparse:
        # The shared expert is as wide as a routed one.
        visited = experts_per_token(text, text.integer("num_local_experts", 16), default=1)
        widths.append((visited + 1) * text.integer("intermediate_size"))
    return max(widths)
