"""Falcon-H1: full attention and Mamba-2 side by side in every layer, so a layer keeps both tokens and a state."""

from __future__ import annotations

from windowpane.kv.caches import StateCache, TokenCache
from windowpane.kv.retention import Full
from windowpane.models.config import Config
from windowpane.models.families.mamba import read_mamba_d
from windowpane.models.parts import (
    attention_tensors,
    embeddings,
    even_head_dim,
    mlp_tensors,
    model_spec,
    norms,
    read_shape,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import TensorSpec

ARCHITECTURES = ("FalconH1ForCausalLM",)


def read(config: Config, name: str) -> ModelSpec:
    shape = read_shape(config, config, tied=False, defaults={"head_dim": even_head_dim(config)})
    expanded = config.integer("mamba_expand", 2) * shape.hidden
    mamba = read_mamba_d(config, config.integer("mamba_d_ssm", expanded))
    width = config.integer("intermediate_size")
    caches: list[TokenCache | StateCache] = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        caches.append(shape.cache(layer, Full()))
        caches.append(mamba.cache(layer))
        tensors += attention_tensors(f"{prefix}self_attn.", shape, bias=config.flag("attention_bias", False))
        tensors += mamba.tensors(
            f"{prefix}mamba.",
            shape.hidden,
            in_bias=config.flag("mamba_proj_bias", False),
            out_bias=config.flag("projectors_bias", False),
            conv_bias=config.flag("mamba_conv_bias", True),
            norm=config.flag("mamba_rms_norm", False),
        )
        tensors += mlp_tensors(f"{prefix}feed_forward.", shape.hidden, width, bias=config.flag("mlp_bias", False))
        tensors += norms(prefix, ("input_layernorm", "pre_ff_layernorm"), shape.hidden)
    tensors += norms("model.", ("final_layernorm",), shape.hidden)
    return model_spec(
        config, config, shape, name=name, family="falcon_h1", widest_mlp=width, caches=caches, tensors=tensors
    )
