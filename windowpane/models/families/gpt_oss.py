"""gpt-oss: sliding and full layers in turn, attention sinks, biases everywhere, and experts in MXFP4."""

from __future__ import annotations

from windowpane.models.config import Config, every
from windowpane.models.parts import (
    FULL,
    SLIDING,
    attention_tensors,
    embeddings,
    experts_per_token,
    fused_experts,
    model_spec,
    norms,
    read_shape,
    retention,
    whole,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = ("GptOssForCausalLM",)


def read(config: Config, name: str) -> ModelSpec:
    shape = read_shape(config, config, tied=False)
    kinds = config.layer_types(shape.layers, (FULL, SLIDING), every(2, FULL, SLIDING, shape.layers))
    experts, width = config.integer("num_local_experts"), config.integer("intermediate_size")
    bias = config.flag("attention_bias", True)
    per_head = Shard(0, ((shape.query_heads, shape.query_heads),))
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        keeps = retention(kind, config, 128)
        caches.append(shape.cache(layer, keeps))
        tensors += attention_tensors(f"{prefix}self_attn.", shape, bias=bias)
        tensors += [
            TensorSpec(f"{prefix}self_attn.sinks", (shape.query_heads,), per_head, part="attention"),
            whole(f"{prefix}mlp.router.weight", experts, shape.hidden),
            whole(f"{prefix}mlp.router.bias", experts),
        ]
        tensors += fused_experts(f"{prefix}mlp.experts.", experts, shape.hidden, width, transposed=True, bias=True)
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="gpt_oss",
        widest_mlp=experts_per_token(config, experts) * width,
        caches=caches,
        tensors=tensors,
    )
