"""gpt-oss: sliding and full layers in turn, attention sinks, biases everywhere, and experts in MXFP4.

GGUF files have gate and up of experts apart, where Hugging Face's have both in one tensor, in turn.
"""

from __future__ import annotations

from windowpane.models.blocks import CHOSEN_SOFTMAX, Router
from windowpane.models.building import Norms, attention, decoder, described_spec, experts
from windowpane.models.config import Config, every
from windowpane.models.parts import (
    FULL,
    SLIDING,
    Shape,
    experts_per_token,
    fused_experts,
    is_from_gguf,
    read_shape,
    retention,
    separate_experts,
    whole,
)
from windowpane.models.rope import YARN, Rope, read_rope
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = ("GptOssForCausalLM",)
DEFAULT_ROPE: dict[str, object] = {
    "rope_type": YARN,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(config: Config, name: str) -> ModelSpec:
    shape = read_shape(config, config, tied=False)
    kinds = config.layer_types(shape.layers, (FULL, SLIDING), every(2, FULL, SLIDING, shape.layers))
    count, width = config.integer("num_local_experts"), config.integer("intermediate_size")
    block_norms = Norms(shape.hidden, config.number("rms_norm_eps", 1e-5))
    rope = _rope(config, shape)
    apart = is_from_gguf(config)
    per_head = Shard(0, ((shape.query_heads, shape.query_heads),))
    layers = []
    for layer, kind in enumerate(kinds):
        at = f"model.layers.{layer}."
        mixer = attention(
            f"{at}self_attn.",
            shape,
            shape.cache(layer, retention(kind, config, 128)),
            rope=rope,
            bias=config.flag("attention_bias", True),
            sinks=TensorSpec(f"{at}self_attn.sinks", (shape.query_heads,), per_head, part="attention"),
        )
        router = Router(
            whole(f"{at}mlp.router.weight", count, shape.hidden),
            experts_per_token(config, count),
            CHOSEN_SOFTMAX,
            bias=whole(f"{at}mlp.router.bias", count),
        )
        sizes = f"{at}mlp.experts.", count, shape.hidden, width
        tensors = separate_experts(*sizes, bias=True) if apart else fused_experts(*sizes, transposed=True, bias=True)
        mlp = experts(
            layer,
            router,
            tensors,
            config.text("hidden_act") or "silu",
            alternates=not apart,
            limit=config.number("swiglu_limit", 7.0),
            alpha=config.number("swiglu_alpha", 1.702),
        )
        layers.append(block_norms.pre(at, mixer, mlp))
    described = decoder("model.", shape, layers, block_norms("model.norm"))
    return described_spec(config, config, shape, name=name, family="gpt_oss", decoder=described)


def _rope(config: Config, shape: Shape) -> Rope:
    if not config.has("rope_parameters") and not config.fields.get("rope_scaling"):
        config = Config({**config.fields, "rope_parameters": DEFAULT_ROPE}, config.where)
    return read_rope(config, shape.head_dim, shape.max_position, theta=150_000.0)
