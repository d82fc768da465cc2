"""Gemma 4's `-it-assistant` models, which draft: their layers make queries only and read K and V of their target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from windowpane.kv.retention import TokenRetention, Window
from windowpane.models.blocks import Attention, Centroids, Decoder, Join, Layer, Projection, tensors_of
from windowpane.models.building import Norms, decoder, gated_mlp
from windowpane.models.config import Config, ModelError
from windowpane.models.families.gemma4 import DEFAULTS, attention_of, layer_kinds, shapes_of, sharing_attention
from windowpane.models.parts import FULL, SLIDING, Shape, model_spec, read_shape, retention, whole
from windowpane.models.spec import ModelSpec

ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
FAMILY = "gemma4_assistant"
DEFAULT_WIDTH = 1536  # of the target
# What Gemma 4 may have and its assistants do not.
ABSENT = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")


def read(config: Config, name: str) -> ModelSpec:
    """Its tensors. It keeps nothing, and what it attends hangs on the target: see `draft_layers`."""
    text = config.section("text_config")
    for key in ABSENT:
        if text.fields.get(key):
            raise ModelError(f"{text.where}{key} is {text.fields[key]!r}, which no assistant of Gemma 4 has")
    shape = read_shape(config, text, tied=True, defaults=DEFAULTS)
    described = _decoder(config, text, shape, _stand_ins(text, shape), shape.layers)
    spec = model_spec(
        config,
        text,
        shape,
        name=name,
        family=FAMILY,
        widest_mlp=described.widest_mlp,
        caches=(),
        tensors=tensors_of(described).values(),
        planned_only="it drafts for another model: name it in --speculative-config",
    )
    return replace(spec, text=config)


def draft_layers(assistant: ModelSpec, target: ModelSpec) -> Decoder:
    """What it computes beside this target: each layer reads the last K and V of its kind that the target keeps."""
    if target.family != "gemma4" or target.decoder is None:
        raise ModelError(f"{assistant.name} drafts for Gemma 4, and {target.name} is of the family {target.family}")
    config = assistant.text
    width = config.integer("backbone_hidden_size", DEFAULT_WIDTH)
    if width != target.hidden_size:
        raise ModelError(
            f"{assistant.name} drafts for a model of width {width}, and that of {target.name} is {target.hidden_size}"
        )
    text = config.section("text_config")
    shape = read_shape(config, text, tied=True, defaults=DEFAULTS)
    owners = {_kind(a): a for a in target.decoder.attentions if a.owns_kv}
    for kind, own in shapes_of(text, shape, layer_kinds(text, shape.layers)).items():
        heads = owners[kind].cache.kv_heads, owners[kind].cache.key_dim
        if (own.kv_heads, own.head_dim) != heads:
            raise ModelError(
                f"{assistant.name} reads {own.kv_heads} KV heads of {own.head_dim} dims in {kind} layers, and "
                f"{target.name} keeps {heads[0]} of {heads[1]}"
            )
    return _decoder(config, text, shape, owners, target.num_layers)


def _kind(attention: Attention) -> str:
    return SLIDING if isinstance(attention.cache.retention, Window) else FULL


def _seen_of(keeps: TokenRetention) -> TokenRetention:
    """What is kept for the target's next token: a drafter's row stands at the last one, which it sees like the rest."""
    return Window(max(keeps.tokens - 1, 1)) if isinstance(keeps, Window) else keeps


def _decoder(config: Config, text: Config, shape: Shape, owners: Mapping[str, Attention], first_layer: int) -> Decoder:
    norms = Norms(shape.hidden, text.number("rms_norm_eps", 1e-6))
    kinds = layer_kinds(text, shape.layers)
    shapes = shapes_of(text, shape, kinds)
    activation, width = text.text("hidden_activation") or "gelu_pytorch_tanh", text.integer("intermediate_size")
    layers = []
    for index, kind in enumerate(kinds):
        at, owner = f"model.layers.{index}.", owners[kind]
        mixer = sharing_attention(text, kind, shapes[kind], f"{at}self_attn.", owner, first_layer + index, norms)
        cache = replace(owner.cache, retention=_seen_of(owner.cache.retention))
        # Where keys lie in pages as they are, their norm is nothing to a drafter.
        mixer = replace(mixer, cache=cache, k_norm=mixer.k_norm if cache.latent else None)
        mlp = gated_mlp(f"{at}mlp.", shape, width, activation)
        layers.append(Layer(norms.both(at, mixer, mlp), whole(f"{at}layer_scalar", 1)))
    backbone = config.integer("backbone_hidden_size", DEFAULT_WIDTH)
    join = Join(
        Projection.of([whole("pre_projection.weight", shape.hidden, 2 * backbone, linear=True)]),
        back=Projection.of([whole("post_projection.weight", backbone, shape.hidden, linear=True)]),
    )
    return decoder(
        "model.", shape, layers, norms("model.norm"), join=join, centroids=_centroids(config, shape),
        first_layer=first_layer,
    )  # fmt: skip


def _centroids(config: Config, shape: Shape) -> Centroids | None:
    if not config.flag("use_ordered_embeddings", False):
        return None
    count, chosen = config.integer("num_centroids", 2048), config.integer("centroid_intermediate_top_k", 32)
    if shape.vocab % count or chosen > count:
        raise ModelError(
            f"num_centroids is {count}, of which {chosen} are read: no even share of {shape.vocab} tokens of vocabulary"
        )
    scores = Projection.of([whole("masked_embedding.centroids.weight", count, shape.hidden, linear=True)])
    return Centroids(scores, whole("masked_embedding.token_ordering", shape.vocab, dtype="int64"), chosen)


def _stand_ins(text: Config, shape: Shape) -> dict[str, Attention]:
    """Attentions of no target, so that the tensors can be listed without one."""
    shapes = shapes_of(text, shape, layer_kinds(text, shape.layers))
    norms = Norms(shape.hidden, text.number("rms_norm_eps", 1e-6))
    return {
        kind: attention_of(text, kind, own, "", own.cache(0, retention(kind, text, 512)), 0, norms)
        for kind, own in shapes.items()
    }
