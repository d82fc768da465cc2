"""Kimi-Linear: three delta-attention layers (KDA), which keep a state, to one of latent attention; experts."""

from __future__ import annotations

from dataclasses import dataclass

from windowpane.kv.caches import StateCache, StatePart, TokenCache
from windowpane.models.config import Config, ModelError
from windowpane.models.families.mla import read_latent_attention
from windowpane.models.parts import (
    FULL,
    LINEAR,
    by_columns,
    by_rows,
    embeddings,
    experts_per_token,
    mlp_tensors,
    model_spec,
    norms,
    read_shape,
    separate_experts,
    whole,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = ("KimiLinearForCausalLM",)

# What Kimi-K3's text model, of the same architecture by name, adds to weights and layers.
OF_K3 = (
    "attn_res_block_size",
    "latent_moe_use_norm",
    "mla_use_output_gate",
    "routed_expert_hidden_size",
    "use_full_rank_gate",
)


@dataclass(frozen=True, slots=True)
class DeltaAttention:
    """The sizes of a KDA layer: q, k and v have the same heads."""

    heads: int
    head_dim: int
    kernel: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def cache(self, layer: int) -> StateCache:
        """Three convolutions remember kernel - 1 inputs each. The recurrent part is float32 in every implementation,
        although the config does not say so.
        """
        remembered = self.head_dim * (self.kernel - 1)
        return StateCache(
            layer,
            (
                *(StatePart(f"conv_{name}", self.heads, remembered) for name in "qkv"),
                StatePart("recurrent", self.heads, self.head_dim**2, "float32"),
            ),
        )

    def tensors(self, prefix: str, hidden: int) -> list[TensorSpec]:
        channels, per_head = Shard(0, ((self.width, self.heads),)), Shard(2, ((self.heads, self.heads),))
        tensors = [by_rows(f"{prefix}{name}_proj.weight", self.width, hidden, self.heads, "state") for name in "qkv"]
        tensors += [
            TensorSpec(f"{prefix}{name}_conv1d.weight", (self.width, 1, self.kernel), channels, part="state")
            for name in "qkv"
        ]
        for gate in ("f", "g"):  # forget and output gates, each through a bottleneck of one head's width
            tensors.append(whole(f"{prefix}{gate}_a_proj.weight", self.head_dim, hidden, part="state", linear=True))
            tensors.append(by_rows(f"{prefix}{gate}_b_proj.weight", self.width, self.head_dim, self.heads, "state"))
        return [
            *tensors,
            by_rows(f"{prefix}b_proj.weight", self.heads, hidden, self.heads, "state"),
            TensorSpec(f"{prefix}A_log", (1, 1, self.heads, 1), per_head, part="state"),
            TensorSpec(f"{prefix}dt_bias", (self.width,), channels, part="state"),
            *norms(prefix, ("o_norm",), self.head_dim),
            by_columns(f"{prefix}o_proj.weight", hidden, self.width, self.heads, "state"),
        ]


def read(config: Config, name: str) -> ModelSpec:
    attends = read_latent_attention(config)
    defaults = {
        "num_key_value_heads": config.integer("num_attention_heads"),
        "head_dim": attends.query_dim,
        "max_position_embeddings": config.integer("model_max_length", 1_048_576),
    }
    shape = read_shape(config, config, tied=False, defaults=defaults)
    linear = config.section("linear_attn_config")
    _refuse_k3(config, linear)
    kinds = _kinds(linear, shape.layers)
    delta = DeltaAttention(
        linear.integer("num_heads"), linear.integer("head_dim"), linear.integer("short_conv_kernel_size", minimum=2)
    )
    if config.integer("moe_layer_freq", 1) != 1:
        raise ModelError(f"moe_layer_freq is {config.integer('moe_layer_freq')}; only 1 is known")
    first_sparse = config.integer("first_k_dense_replace", 1, minimum=0)
    caches: list[TokenCache | StateCache] = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        mixer = delta if kind == LINEAR else attends
        caches.append(mixer.cache(layer))
        tensors += mixer.tensors(f"{prefix}self_attn.", shape.hidden)
        if layer < first_sparse:
            tensors += mlp_tensors(f"{prefix}mlp.", shape.hidden, config.integer("intermediate_size"))
        else:
            tensors += _experts(f"{prefix}block_sparse_moe.", config, shape.hidden)
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    visited = experts_per_token(config, config.integer("num_experts"), "num_experts_per_token")
    visited += config.integer("num_shared_experts")
    widths = (config.integer("intermediate_size"), visited * config.integer("moe_intermediate_size"))
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="kimi_linear",
        widest_mlp=max(widths[0] if first_sparse else 0, widths[1]),
        caches=caches,
        tensors=tensors,
    )


def _refuse_k3(config: Config, linear: Config) -> None:
    """null, false and 0 add nothing."""
    if found := [f"{part.where}{key}" for part in (config, linear) for key in OF_K3 if part.fields.get(key)]:
        raise ModelError(
            f"the config sets {', '.join(found)}, as Kimi-K3 does, which cannot be planned: "
            "of this architecture only Kimi-Linear can, which has none of them"
        )


def _kinds(linear: Config, layers: int) -> tuple[str, ...]:
    """Two lists of layer numbers, counted from 1, that together name every layer once."""
    full, kda = linear.integers("full_attn_layers"), linear.integers("kda_layers")
    if full is None or kda is None or sorted([*full, *kda]) != list(range(1, layers + 1)):
        raise ModelError(
            f"{linear.where}full_attn_layers and kda_layers must name each of the layers 1 to {layers} once"
        )
    return tuple(FULL if layer + 1 in full else LINEAR for layer in range(layers))


def _experts(prefix: str, config: Config, hidden: int) -> list[TensorSpec]:
    experts, width = config.integer("num_experts"), config.integer("moe_intermediate_size")
    return [
        whole(f"{prefix}gate.weight", experts, hidden),
        whole(f"{prefix}gate.e_score_correction_bias", experts),
        *separate_experts(f"{prefix}experts.", experts, hidden, width, names=("w1", "w3", "w2")),
        *mlp_tensors(f"{prefix}shared_experts.", hidden, config.integer("num_shared_experts") * width),
    ]
