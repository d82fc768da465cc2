"""DeepSeek V3 and V3.2, Kimi K2 and K2.5, GLM 4.7 Flash and GLM 5: latent attention and experts.

The indexers of V3.2 and GLM 5 keep a key per token.
"""

from __future__ import annotations

from windowpane.kv.caches import TokenCache
from windowpane.models.config import Config, ModelError
from windowpane.models.families.mla import LatentAttention, latent_cache, read_latent_attention
from windowpane.models.parts import (
    embeddings,
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

KIMI_K25 = "KimiK25ForConditionalGeneration"
GLM_LITE = "Glm4MoeLiteForCausalLM"
WITHOUT_INDEXER = ("DeepseekV3ForCausalLM", KIMI_K25, GLM_LITE)
ARCHITECTURES = (*WITHOUT_INDEXER, "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")

OWN, SHARED = "full", "shared"

INDEXER_NOTE = "index keys are stored in the KV format of the other full caches; the published code keeps them in fp8"


def read(config: Config, name: str) -> ModelSpec:
    if config.texts("architectures") != (KIMI_K25,):
        return _read(config, config, name)
    text = config.section("text_config")
    known = ("DeepseekV3ForCausalLM",)
    if (inner := text.texts("architectures") or known) != known:
        raise text.unknown_value("architectures", inner[0], known)
    return _read(config, text, name, wrapper="language_model.")


def _read(root: Config, config: Config, name: str, wrapper: str = "") -> ModelSpec:
    """`config` is that of the text model, whose tensors begin with `wrapper`."""
    attends = read_latent_attention(config)
    shape = read_shape(root, config, tied=False, defaults={"head_dim": attends.query_dim})
    if config.integer("moe_layer_freq", 1) != 1:
        raise ModelError(f"{config.where}moe_layer_freq is {config.integer('moe_layer_freq')}; only 1 is known")
    first_sparse = _first_sparse(config, shape.layers, 1 if root.texts("architectures") == (GLM_LITE,) else 3)
    indexed = _indexed_layers(root, shape.layers)
    caches: list[TokenCache] = []
    tensors: list[TensorSpec] = embeddings(f"{wrapper}model.", shape, head=f"{wrapper}lm_head.weight")
    for layer in range(shape.layers):
        prefix = f"{wrapper}model.layers.{layer}."
        caches.append(attends.cache(layer))
        tensors += attends.tensors(f"{prefix}self_attn.", shape.hidden)
        if layer in indexed:
            caches.append(latent_cache(layer, config.integer("index_head_dim")))
            tensors += _indexer(f"{prefix}self_attn.indexer.", config, attends, shape.hidden)
        if layer < first_sparse:
            tensors += mlp_tensors(f"{prefix}mlp.", shape.hidden, config.integer("intermediate_size"))
        else:
            tensors += _experts(f"{prefix}mlp.", config, shape.hidden)
        tensors += norms(prefix, ("input_layernorm", "post_attention_layernorm"), shape.hidden)
    tensors += norms(f"{wrapper}model.", ("norm",), shape.hidden)
    return model_spec(
        root,
        config,
        shape,
        name=name,
        family="deepseek",
        widest_mlp=_widest(config, shape.layers, first_sparse),
        caches=caches,
        tensors=tensors,
        notes=(*mtp_notes(config), *((INDEXER_NOTE,) if indexed else ())),
    )


def _first_sparse(config: Config, layers: int, default: int) -> int:
    """How many layers have an MLP before those with experts: a number, or in newer configs a word for each layer."""
    words = config.texts("mlp_layer_types")
    if words is None:
        return config.integer("first_k_dense_replace", default, minimum=0)
    dense = words.count("dense")
    if words != ("dense",) * dense + ("sparse",) * (layers - dense):
        raise ModelError(
            f"{config.where}mlp_layer_types must be dense for some layers and sparse for the rest of {layers}"
        )
    return dense


def _indexed_layers(config: Config, layers: int) -> frozenset[int]:
    """The layers with an indexer of their own; in GLM others take over the choice of the last one before them."""
    if (config.texts("architectures") or ("",))[0] in WITHOUT_INDEXER:
        return frozenset()
    kinds = config.texts("indexer_types") or (OWN,) * layers
    if len(kinds) != layers:
        raise ModelError(f"indexer_types has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        if kind not in (OWN, SHARED):
            raise config.unknown_value("indexer_types", kind, (OWN, SHARED))
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == OWN)


def _indexer(prefix: str, config: Config, attends: LatentAttention, hidden: int) -> list[TensorSpec]:
    """It picks the tokens that attention reads, so every rank runs it whole."""
    heads, width = config.integer("index_n_heads"), config.integer("index_head_dim")
    if attends.query_rank is None:
        raise ModelError("the config has no q_lora_rank, from which the indexer takes its queries")
    return [
        whole(f"{prefix}wq_b.weight", heads * width, attends.query_rank, part="attention", linear=True),
        whole(f"{prefix}wk.weight", width, hidden, part="attention", linear=True),
        whole(f"{prefix}k_norm.weight", width),
        whole(f"{prefix}k_norm.bias", width),
        # Not quantized in the fp8 checkpoints of this family, so no `linear`.
        whole(f"{prefix}weights_proj.weight", heads, hidden, part="attention"),
    ]


def _experts(prefix: str, config: Config, hidden: int) -> list[TensorSpec]:
    experts, width = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts")
    return [
        whole(f"{prefix}gate.weight", experts, hidden),
        whole(f"{prefix}gate.e_score_correction_bias", experts),
        *separate_experts(f"{prefix}experts.", experts, hidden, width),
        *mlp_tensors(f"{prefix}shared_experts.", hidden, shared * width),
    ]


def _widest(config: Config, layers: int, first_sparse: int) -> int:
    widths = [config.integer("intermediate_size")] if first_sparse else []
    if first_sparse < layers:
        visited = experts_per_token(config, config.integer("n_routed_experts")) + config.integer("n_shared_experts")
        widths.append(visited * config.integer("moe_intermediate_size"))
    return max(widths)
