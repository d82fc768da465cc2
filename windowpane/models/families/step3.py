"""Step-3 (queries of all heads from one narrow vector, one KV head), Step-3.5 and 3.7 Flash (three sliding layers to a
full one, which differ in query heads, and a gate per head). All have experts; of multimodal ones the text part is read.
"""

from __future__ import annotations

from dataclasses import replace

from windowpane.kv.caches import TokenCache
from windowpane.models.config import Config, ModelError
from windowpane.models.parts import (
    FULL,
    SLIDING,
    Shape,
    attention_tensors,
    by_columns,
    by_rows,
    embeddings,
    experts_per_token,
    listed_sparse,
    mlp_tensors,
    model_spec,
    mtp_notes,
    norms,
    read_shape,
    retention,
    whole,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

STEP3 = ("Step3VLForConditionalGeneration", "Step3TextForCausalLM")
ARCHITECTURES = (*STEP3, "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration")

# What this family calls the fields that others share, and transformers' own names for them.
OTHER_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "max_position_embedding": "max_position_embeddings",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dims": "share_expert_dim",
}


def read(config: Config, name: str) -> ModelSpec:
    is_step3 = (config.texts("architectures") or ("",))[0] in STEP3
    text = _renamed(config.section("text_config") if config.has("text_config") else config)
    shape = read_shape(config, text, tied=False)
    kinds = text.layer_types(shape.layers, (FULL, SLIDING), (FULL,) * shape.layers)
    shapes = {FULL: shape, SLIDING: _sliding_shape(text, shape)}
    sparse = _sparse_layers(text, shape.layers)
    caches = []
    tensors: list[TensorSpec] = embeddings("model.", shape, uneven=True)
    for layer, kind in enumerate(kinds):
        prefix, own = f"model.layers.{layer}.", shapes[kind]
        caches.append(TokenCache(layer, retention(kind, text), own.kv_heads, own.head_dim, own.head_dim))
        if is_step3:
            tensors += _narrow_attention(f"{prefix}self_attn.", own, text.integer("share_q_dim", shape.hidden))
        else:
            tensors += attention_tensors(f"{prefix}self_attn.", own, qk_norm=True)
            tensors.append(
                by_rows(f"{prefix}self_attn.g_proj.weight", own.query_heads, own.hidden, own.query_heads, "attention")
            )
        if layer in sparse:
            tensors += _experts(prefix, text, shape.hidden, has_bias=not is_step3)
        else:
            tensors += mlp_tensors(f"{prefix}mlp.", shape.hidden, text.integer("intermediate_size"))
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms("model.", ("norm",), shape.hidden)
    routed = experts_per_token(text, text.integer("moe_num_experts"), "moe_top_k") * text.integer(
        "moe_intermediate_size"
    )
    return model_spec(
        config,
        text,
        replace(shape, query_heads=max(own.query_heads for own in shapes.values())),
        name=name,
        family="step3",
        widest_mlp=max(text.integer("intermediate_size"), routed + text.integer("share_expert_dim")),
        caches=caches,
        tensors=tensors,
        notes=mtp_notes(text),
    )


def _renamed(text: Config) -> Config:
    """The fields under one name each; lists for each layer without the entries of the layers that only draft."""
    fields = {OTHER_NAMES.get(key, key): value for key, value in text.fields.items()}
    layers, drafts = text.layers("num_hidden_layers"), text.integer("num_nextn_predict_layers", 0, minimum=0)
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers + drafts:
        fields["layer_types"] = kinds[:layers]
    return Config(fields, text.where)


def _sliding_shape(text: Config, shape: Shape) -> Shape:
    """Sliding layers have heads of their own, in one of two forms."""
    if text.has("attention_other_setting"):
        other = text.section("attention_other_setting")
        return replace(
            shape,
            query_heads=other.integer("num_attention_heads", shape.query_heads),
            kv_heads=other.integer("num_attention_groups", shape.kv_heads),
            head_dim=other.integer("head_dim", shape.head_dim),
        )
    return replace(shape, query_heads=text.integer("num_sliding_attention_heads", shape.query_heads))


def _sparse_layers(text: Config, layers: int) -> frozenset[int]:
    """`moe_layers_enum` names them in a list or a string ("4,5,6"), newer configs in words; else all but the first."""
    sparse = listed_sparse(text, layers)
    if sparse is not None:
        return sparse
    listed = text.fields.get("moe_layers_enum")
    if listed is None:
        return frozenset(range(1, layers))
    numbers = listed.split(",") if isinstance(listed, str) else listed if isinstance(listed, list) else ["?"]
    try:
        return frozenset(range(layers)) & {int(number) for number in numbers}
    except (TypeError, ValueError):
        raise ModelError(f"{text.where}moe_layers_enum must be layer numbers, not {listed!r:.60}") from None


def _narrow_attention(prefix: str, shape: Shape, narrow: int) -> list[TensorSpec]:
    """One vector is normed, then widened to the queries of all heads."""
    queries, heads = shape.query_heads * shape.head_dim, shape.query_heads
    keys = shape.kv_heads * shape.head_dim
    return [
        whole(f"{prefix}q_proj.weight", narrow, shape.hidden, part="attention", linear=True),
        by_rows(f"{prefix}k_proj.weight", keys, shape.hidden, shape.kv_heads, "attention"),
        by_rows(f"{prefix}v_proj.weight", keys, shape.hidden, shape.kv_heads, "attention"),
        *norms(prefix, ("inter_norm",), narrow),
        by_rows(f"{prefix}wq.weight", queries, narrow, heads, "attention"),
        by_columns(f"{prefix}o_proj.weight", shape.hidden, queries, heads, "attention"),
    ]


def _experts(prefix: str, text: Config, hidden: int, *, has_bias: bool) -> list[TensorSpec]:
    experts, width = text.integer("moe_num_experts"), text.integer("moe_intermediate_size")
    shard = Shard(0, ((experts, experts),))
    matrices = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return [
        whole(f"{prefix}moe.gate.weight", experts, hidden),
        *([whole(f"{prefix}moe.router_bias", experts)] if has_bias else []),
        *(
            TensorSpec(f"{prefix}moe.{part}.weight", (experts, *shape), shard, linear=True, part="experts")
            for part, shape in matrices.items()
        ),
        *mlp_tensors(f"{prefix}share_expert.", hidden, text.integer("share_expert_dim")),
    ]
