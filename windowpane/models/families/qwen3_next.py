"""Qwen3-Next, 3.5, 3.6 and 3.8: three gated-delta layers, which keep a state, to one full layer with gated queries."""

from __future__ import annotations

from dataclasses import dataclass

from windowpane.kv.caches import StateCache, StatePart, TokenCache
from windowpane.kv.retention import Full
from windowpane.models.config import Config, ModelError, every
from windowpane.models.families import towers
from windowpane.models.parts import (
    FULL,
    LINEAR,
    attention_tensors,
    by_columns,
    by_rows,
    embeddings,
    experts_per_token,
    fused_experts,
    mlp_tensors,
    model_spec,
    norms,
    read_shape,
    separate_experts,
    sparse_layers,
    whole,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)

DEFAULTS = {
    "vocab_size": 248_320,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
}
MOE_DEFAULTS = DEFAULTS | {"num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The sizes of a linear-attention layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_dtype: str | None

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def qkv_sections(self) -> tuple[tuple[int, int], ...]:
        return ((self.keys, self.key_heads), (self.keys, self.key_heads), (self.values, self.value_heads))

    def cache(self, layer: int) -> StateCache:
        """The convolution remembers the inputs before this token, kernel - 1 of them, in the compute dtype."""
        remembered = self.kernel - 1
        return StateCache(
            layer,
            (
                StatePart("conv_q", self.key_heads, self.key_dim * remembered),
                StatePart("conv_k", self.key_heads, self.key_dim * remembered),
                StatePart("conv_v", self.value_heads, self.value_dim * remembered),
                StatePart("recurrent", self.value_heads, self.key_dim * self.value_dim, self.state_dtype),
            ),
        )


def read(config: Config, name: str) -> ModelSpec:
    nested = config.has("text_config")
    text = config.section("text_config") if nested else config
    architecture = (config.texts("architectures") or ("",))[0]
    is_next = architecture == "Qwen3NextForCausalLM"
    has_experts = is_next or "Moe" in architecture
    defaults = None if is_next else MOE_DEFAULTS if has_experts else DEFAULTS
    shape = read_shape(config, text, tied=False, defaults=defaults)
    interval = text.integer("full_attention_interval", 4)
    kinds = text.layer_types(shape.layers, (FULL, LINEAR), every(interval, FULL, LINEAR, shape.layers))
    sparse = sparse_layers(text, shape.layers) if has_experts else frozenset()
    delta = _gated_delta(text)
    prefix = "model.language_model." if nested else "model."

    caches: list[TokenCache | StateCache] = []
    tensors: list[TensorSpec] = embeddings(prefix, shape)
    for layer, kind in enumerate(kinds):
        layer_prefix = f"{prefix}layers.{layer}."
        if kind == FULL:
            caches.append(shape.cache(layer, Full()))
            bias = text.flag("attention_bias", False)
            tensors += attention_tensors(f"{layer_prefix}self_attn.", shape, bias=bias, qk_norm=True, gated=True)
        else:
            caches.append(delta.cache(layer))
            tensors += _linear_attention(f"{layer_prefix}linear_attn.", delta, shape.hidden, fused=is_next)
        if layer in sparse:
            # Unquantized Qwen3.5 checkpoints fuse the experts of a layer; Qwen3-Next and quantized ones do not.
            fused = not is_next and not config.has("quantization_config")
            tensors += _experts(f"{layer_prefix}mlp.", text, shape.hidden, fused)
        else:
            tensors += mlp_tensors(f"{layer_prefix}mlp.", shape.hidden, text.integer("intermediate_size"))
        tensors += norms(layer_prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms(prefix, ("norm",), shape.hidden)
    if nested and config.has("vision_config"):
        tensors += towers.qwen3_5(config)
    return model_spec(
        config,
        text,
        shape,
        name=name,
        family="qwen3_next",
        widest_mlp=_widest(text, shape.layers, sparse),
        caches=caches,
        tensors=tensors,
    )


def _gated_delta(text: Config) -> GatedDelta:
    delta = GatedDelta(
        key_heads=text.integer("linear_num_key_heads", 16),
        value_heads=text.integer("linear_num_value_heads", 32),
        key_dim=text.integer("linear_key_head_dim", 128),
        value_dim=text.integer("linear_value_head_dim", 128),
        kernel=text.integer("linear_conv_kernel_dim", 4, minimum=2),
        state_dtype=text.dtype("mamba_ssm_dtype"),
    )
    if delta.value_heads % delta.key_heads:
        raise ModelError(
            f"{text.where}linear_num_value_heads is {delta.value_heads}, "
            f"no multiple of linear_num_key_heads, {delta.key_heads}"
        )
    return delta


def _linear_attention(prefix: str, delta: GatedDelta, hidden: int, fused: bool) -> list[TensorSpec]:
    """Qwen3-Next fuses q, k, v and the gate by key head; later models only q|k|v, one after another."""
    qkv = Shard(0, delta.qkv_sections)
    qkv_rows = sum(length for length, _ in delta.qkv_sections)
    heads = Shard(0, ((delta.value_heads, delta.value_heads),))
    if fused:
        projections = [
            by_rows(f"{prefix}in_proj_qkvz.weight", qkv_rows + delta.values, hidden, delta.key_heads, "state"),
            by_rows(f"{prefix}in_proj_ba.weight", 2 * delta.value_heads, hidden, delta.key_heads, "state"),
        ]
    else:
        projections = [
            TensorSpec(f"{prefix}in_proj_qkv.weight", (qkv_rows, hidden), qkv, linear=True, part="state"),
            by_rows(f"{prefix}in_proj_z.weight", delta.values, hidden, delta.value_heads, "state"),
            by_rows(f"{prefix}in_proj_b.weight", delta.value_heads, hidden, delta.value_heads, "state"),
            by_rows(f"{prefix}in_proj_a.weight", delta.value_heads, hidden, delta.value_heads, "state"),
        ]
    return [
        *projections,
        TensorSpec(f"{prefix}conv1d.weight", (qkv_rows, 1, delta.kernel), qkv, part="state"),
        TensorSpec(f"{prefix}dt_bias", (delta.value_heads,), heads, part="state"),
        TensorSpec(f"{prefix}A_log", (delta.value_heads,), heads, part="state"),
        whole(f"{prefix}norm.weight", delta.value_dim),
        by_columns(f"{prefix}out_proj.weight", hidden, delta.values, delta.value_heads, "state"),
    ]


def _experts(prefix: str, text: Config, hidden: int, fused: bool) -> list[TensorSpec]:
    experts, width = text.integer("num_experts"), text.integer("moe_intermediate_size", 512)
    shared = text.integer("shared_expert_intermediate_size", 512)
    routed = (
        fused_experts(f"{prefix}experts.", experts, hidden, width, transposed=False)
        if fused
        else separate_experts(f"{prefix}experts.", experts, hidden, width)
    )
    return [
        whole(f"{prefix}gate.weight", experts, hidden),
        *routed,
        *mlp_tensors(f"{prefix}shared_expert.", hidden, shared),
        whole(f"{prefix}shared_expert_gate.weight", 1, hidden),
    ]


def _widest(text: Config, layers: int, sparse: frozenset[int]) -> int:
    widths = [text.integer("intermediate_size")] if len(sparse) < layers else []
    if sparse:
        visited = experts_per_token(text, text.integer("num_experts"))
        routed = visited * text.integer("moe_intermediate_size", 512)
        widths.append(routed + text.integer("shared_expert_intermediate_size", 512))
    return max(widths)
