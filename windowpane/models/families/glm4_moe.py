"""GLM 4.5, 4.6 and 4.7: grouped attention, dense layers first, then experts with shared ones beside them."""

from __future__ import annotations

from windowpane.kv.retention import Full
from windowpane.models.config import Config
from windowpane.models.parts import (
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
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

ARCHITECTURES = ("Glm4MoeForCausalLM",)


def read(config: Config, name: str) -> ModelSpec:
    shape = read_shape(config, config, tied=False, defaults={"head_dim": even_head_dim(config)})
    first_sparse = config.integer("first_k_dense_replace", 1, minimum=0)
    experts, width = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts", 1, minimum=0)
    bias, qk_norm = config.flag("attention_bias", False), config.flag("use_qk_norm", False)
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        caches.append(shape.cache(layer, Full()))
        tensors += attention_tensors(f"{prefix}self_attn.", shape, bias=bias, out_bias=False, qk_norm=qk_norm)
        if layer < first_sparse:
            tensors += mlp_tensors(f"{prefix}mlp.", shape.hidden, config.integer("intermediate_size"))
        else:
            tensors.append(whole(f"{prefix}mlp.gate.weight", experts, shape.hidden))
            tensors.append(whole(f"{prefix}mlp.gate.e_score_correction_bias", experts))
            tensors += separate_experts(f"{prefix}mlp.experts.", experts, shape.hidden, width)
            tensors += mlp_tensors(f"{prefix}mlp.shared_experts.", shape.hidden, shared * width) if shared else []
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    routed = (experts_per_token(config, experts) + shared) * width
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="glm4_moe",
        widest_mlp=max(routed, config.integer("intermediate_size") if first_sparse else 0),
        caches=caches,
        tensors=tensors,
        notes=mtp_notes(config),
    )
