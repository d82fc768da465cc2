"""What families share: shapes, retentions, and the tensors of attention, MLPs and experts with how they shard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from windowpane.kv.caches import Cache, TokenCache
from windowpane.kv.retention import Chunk, Full, TokenRetention, Window
from windowpane.models.blocks import Decoder
from windowpane.models.config import Config, ModelError
from windowpane.models.quantization import read_quantization
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
DENSE, SPARSE = "dense", "sparse"  # MLPs in a config's words

# Gemma norms what goes into each block and what comes out of it.
SANDWICH_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that every decoder has. `tied` means that the LM head is the embedding."""

    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int
    tied: bool

    def cache(self, layer: int, keeps: TokenRetention, *, latent: bool = False) -> TokenCache:
        return TokenCache(layer, keeps, self.kv_heads, self.head_dim, self.head_dim, latent=latent)


def read_shape(config: Config, text: Config, tied: bool, defaults: Mapping[str, int] | None = None) -> Shape:
    """Read the sizes from `text`, which is `config` where nothing is nested; `defaults` are the config class's."""
    known = defaults or {}

    def size(key: str) -> int:
        return text.integer(key, known.get(key))

    query_heads, kv_heads = size("num_attention_heads"), size("num_key_value_heads")
    if query_heads % kv_heads:
        raise ModelError(
            f"{text.where}num_attention_heads is {query_heads}, no multiple of num_key_value_heads, {kv_heads}"
        )
    return Shape(
        hidden=size("hidden_size"),
        layers=text.layers("num_hidden_layers", known.get("num_hidden_layers")),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=size("head_dim"),
        vocab=size("vocab_size"),
        max_position=size("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", tied)),
    )


def even_head_dim(config: Config) -> int:
    """The head size of models that may leave it out: the width shared evenly among the query heads."""
    if config.has("head_dim"):
        return config.integer("head_dim")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % heads:
        raise ModelError(f"the config has no head_dim, and hidden_size {hidden} is no multiple of {heads} query heads")
    return hidden // heads


def retention(
    kind: str, config: Config, default_window: int | None = None, default_chunk: int | None = None
) -> TokenRetention:
    """What an attention layer of this kind keeps.

    Hugging Face's sliding_window w lets a token see w tokens, itself included, in every family here; so does `Window`.
    The config class's default sizes count only where the field is absent: a null one cannot size a layer.
    """
    if kind == FULL:
        return Full()
    if kind == SLIDING:
        return Window(_size_unless_null(config, "sliding_window", default_window))
    if kind == CHUNKED:
        return Chunk(_size_unless_null(config, "attention_chunk_size", default_chunk))
    raise ModelError(f"{config.where}layer_types: {kind!r} is not a kind of attention")


def _size_unless_null(config: Config, key: str, default: int | None) -> int:
    if not config.has(key) and (default is None or key in config.fields):
        kind = SLIDING if key == "sliding_window" else CHUNKED
        raise ModelError(
            f"some layers are {kind}, but the config has no {config.where}{key} that says how far they see"
        )
    return config.integer(key, default)


def first_kv_shared_layer(config: Config, layers: int, default_shared: int = 0) -> int:
    """From this layer on, layers take K and V from the last earlier layer of their kind and own no cache."""
    shared = config.integer("num_kv_shared_layers", default_shared, minimum=0)
    if shared >= layers:
        raise ModelError(f"{config.where}num_kv_shared_layers is {shared}, but the model has only {layers} layers")
    return layers - shared


def sparse_layers(config: Config, layers: int) -> frozenset[int]:
    """The layers that have experts: every `decoder_sparse_step`-th, without those listed as MLP only."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.integers("mlp_only_layers") or ()
    return frozenset(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense)


def listed_sparse(config: Config, layers: int) -> frozenset[int] | None:
    """The layers that have experts, where a config has a word for each layer, as transformers 5 saves them."""
    words = config.texts("mlp_layer_types")
    if words is None:
        return None
    if len(words) < layers:
        raise ModelError(f"{config.where}mlp_layer_types has {len(words)} entries for {layers} layers")
    for word in words:
        if word not in (DENSE, SPARSE):
            raise config.unknown_value("mlp_layer_types", word, (DENSE, SPARSE))
    return frozenset(layer for layer, word in enumerate(words[:layers]) if word == SPARSE)


def is_from_gguf(config: Config) -> bool:
    """Whether a config was made from a GGUF header: its tensors lie as llama.cpp has them, gate and up apart."""
    return config.has("_windowpane") and config.section("_windowpane").flag("gguf", False)


def experts_per_token(
    config: Config, experts: int, key: str = "num_experts_per_tok", default: int | None = None
) -> int:
    """How many of `experts` a token visits."""
    visited = config.integer(key, default)
    if visited > experts:
        raise ModelError(f"{config.where}{key} is {visited}, but a layer has only {experts} experts")
    return visited


def mtp_notes(config: Config, key: str = "num_nextn_predict_layers") -> tuple[str, ...]:
    """A word where the checkpoint carries layers for multi-token prediction, which are neither loaded nor counted."""
    count = config.integer(key, 0, minimum=0)
    layers = "layer for multi-token prediction is" if count == 1 else "layers for multi-token prediction are"
    return (f"the {layers} not counted",) if count else ()


def activation_problem(config: Config, key: str) -> str:
    """Why recurrent layers do not run whose convolution ends in the activation that `key` names, or nothing."""
    value = config.text(key) or "silu"
    known = "silu", "swish"  # two words for one function
    return "" if value in known else f"{config.where}{key} is {value!r}, and recurrent layers run with silu only"


def causal_only(config: Config, allowed: Sequence[str] = ()) -> None:
    """Refuse encoders: `use_bidirectional_attention` changes which tokens a layer sees."""
    value = config.fields.get("use_bidirectional_attention")
    if value and value not in allowed:
        raise ModelError(
            f"{config.where}use_bidirectional_attention is {value!r}: that is an encoder, and encoders generate no text"
        )


def model_spec(
    config: Config,
    text: Config,
    shape: Shape,
    *,
    name: str,
    family: str,
    widest_mlp: int,
    caches: Iterable[Cache],
    tensors: Iterable[TensorSpec],
    shared_caches: Iterable[TokenCache] = (),
    decoder: Decoder | None = None,
    notes: Iterable[str] = (),
    planned_only: str = "",
) -> ModelSpec:
    """Put the pieces together with what the config says about dtype and quantization."""
    dtype = text.dtype("dtype", "torch_dtype") or config.dtype("dtype", "torch_dtype")
    # Quantized checkpoints such as gpt-oss name no dtype; what is not quantized in them is bfloat16.
    assumed = () if dtype else ("the config names no dtype; bfloat16 is assumed",)
    architectures = config.texts("architectures") or ()
    provenance = config.section("_windowpane").text("note") if config.has("_windowpane") else None
    return ModelSpec(
        name=name,
        architecture=architectures[0],
        family=family,
        dtype=dtype or "bfloat16",
        hidden_size=shape.hidden,
        widest_mlp=widest_mlp,
        query_heads=shape.query_heads,
        vocab_size=shape.vocab,
        num_layers=shape.layers,
        max_position=shape.max_position,
        caches=tuple(caches),
        tensors=tuple(tensors),
        text=text,
        decoder=decoder,
        quantization=read_quantization(config, text),
        shared_caches=tuple(shared_caches),
        notes=(*assumed, *notes, *((provenance,) if provenance else ())),
        planned_only=planned_only,
    )


def by_rows(name: str, rows: int, columns: int, units: int, part: str) -> TensorSpec:
    """A Linear whose outputs are split over ranks."""
    return TensorSpec(name, (rows, columns), Shard(0, ((rows, units),)), linear=True, part=part)


def by_columns(name: str, rows: int, columns: int, units: int, part: str) -> TensorSpec:
    """A Linear whose inputs are split over ranks; the ranks' outputs are summed."""
    return TensorSpec(name, (rows, columns), Shard(1, ((columns, units),)), linear=True, part=part)


def whole(name: str, *shape: int, part: str = "other", linear: bool = False, dtype: str | None = None) -> TensorSpec:
    """A tensor that every rank holds in full."""
    return TensorSpec(name, shape, linear=linear, part=part, dtype=dtype)


def with_biases(weights: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Each Linear followed by its bias, which is split only where the outputs are."""
    out: list[TensorSpec] = []
    for weight in weights:
        splits_outputs = weight.shard is not None and weight.shard.axis == 0
        bias = TensorSpec(
            f"{weight.module}.bias", weight.shape[:1], weight.shard if splits_outputs else None, part=weight.part
        )
        out += [weight, bias]
    return out


def embeddings(
    prefix: str, shape: Shape, head: str = "lm_head.weight", table: str = "embed_tokens", *, uneven: bool = False
) -> list[TensorSpec]:
    """The token embedding, and the LM head where it is not the same tensor.

    `uneven`, for models that are planned only: the rows beyond a multiple of 64 are on every rank, as others pad them.
    """
    rest = shape.vocab % 64 if uneven and shape.vocab > 64 else 0
    sections = ((shape.vocab - rest, shape.vocab - rest), *(((rest, 1),) if rest else ()))
    rows, size = Shard(0, sections), (shape.vocab, shape.hidden)
    tensors = [TensorSpec(f"{prefix}{table}.weight", size, rows, part="embedding")]
    if not shape.tied:
        tensors.append(TensorSpec(head, size, rows, linear=True, part="embedding"))
    return tensors


def norms(prefix: str, names: Iterable[str], width: int) -> list[TensorSpec]:
    return [whole(f"{prefix}{name}.weight", width) for name in names]


def attention_tensors(
    prefix: str,
    shape: Shape,
    *,
    bias: bool = False,
    out_bias: bool | None = None,
    qk_norm: bool = False,
    gated: bool = False,
    owns_kv: bool = True,
    has_v: bool = True,
) -> list[TensorSpec]:
    """q, k, v and o of one layer. `gated` queries carry a gate per head; layers that share KV have no k and v.

    `out_bias` None: the output projection has a bias where the others do.
    """
    query_dim = shape.query_heads * shape.head_dim
    kv_dim = shape.kv_heads * shape.head_dim
    query_rows = 2 * query_dim if gated else query_dim
    weights = [by_rows(f"{prefix}q_proj.weight", query_rows, shape.hidden, shape.query_heads, "attention")]
    if owns_kv:
        names = ("k_proj", "v_proj") if has_v else ("k_proj",)
        weights += [by_rows(f"{prefix}{n}.weight", kv_dim, shape.hidden, shape.kv_heads, "attention") for n in names]
    out = [by_columns(f"{prefix}o_proj.weight", shape.hidden, query_dim, shape.query_heads, "attention")]
    tensors = with_biases(weights) if bias else weights
    tensors += with_biases(out) if (bias if out_bias is None else out_bias) else out
    if qk_norm:
        tensors += norms(prefix, ("q_norm", "k_norm") if owns_kv else ("q_norm",), shape.head_dim)
    return tensors


def mlp_tensors(
    prefix: str,
    hidden: int,
    width: int,
    *,
    bias: bool = False,
    gated: bool = True,
    part: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[TensorSpec]:
    """`names` are those of gate, up and down; without a gate the first is left out."""
    gate, up, down = names
    weights = [by_rows(f"{prefix}{n}.weight", width, hidden, width, part) for n in ((gate, up) if gated else (up,))]
    weights.append(by_columns(f"{prefix}{down}.weight", hidden, width, width, part))
    return with_biases(weights) if bias else weights


def fused_mlp_tensors(
    prefix: str, hidden: int, width: int, *, bias: bool = False, names: tuple[str, str] = ("gate_up_proj", "down_proj")
) -> list[TensorSpec]:
    """An MLP whose gate and up are one Linear, gate first."""
    up, down = names
    sections = ((width, width), (width, width))
    weights = [
        TensorSpec(f"{prefix}{up}.weight", (2 * width, hidden), Shard(0, sections), linear=True, part="mlp"),
        by_columns(f"{prefix}{down}.weight", hidden, width, width, "mlp"),
    ]
    return with_biases(weights) if bias else weights


def separate_experts(
    prefix: str,
    experts: int,
    hidden: int,
    width: int,
    *,
    gated: bool = True,
    bias: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[TensorSpec]:
    """Experts that the checkpoint stores one by one. Ranks hold whole experts, so that no quantization group is cut."""
    return [
        replace(
            tensor, shape=(experts, *tensor.shape), shard=Shard(0, ((experts, experts),)), stacked=True, part="experts"
        )
        for tensor in mlp_tensors(f"{prefix}{{}}.", hidden, width, bias=bias, gated=gated, names=names)
    ]


def fused_experts(
    prefix: str, experts: int, hidden: int, width: int, *, transposed: bool, bias: bool = False
) -> list[TensorSpec]:
    """Experts that the checkpoint stores in one tensor, gate and up together; `transposed` ones are input-first."""
    shard = Shard(0, ((experts, experts),))
    tensors: list[TensorSpec] = []
    for name, rows, columns in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        matrix = (columns, rows) if transposed else (rows, columns)
        tensors.append(
            TensorSpec(f"{prefix}{name}", (experts, *matrix), shard, linear=True, part="experts", transposed=transposed)
        )
        if bias:
            tensors.append(TensorSpec(f"{prefix}{name}_bias", (experts, rows), shard, part="experts"))
    return tensors


def per_layer_tensors(
    prefix: str, shape: Shape, vocab: int, width: int
) -> tuple[tuple[TensorSpec, TensorSpec], list[tuple[TensorSpec, TensorSpec]]]:
    """Gemma 3n and 4: a table that gives every layer its own `width` values per token, and what mixes them in.

    First the table and the model's own projection, then gate and projection of every layer; norms are apart.
    """
    all_layers, rows = shape.layers * width, Shard(0, ((vocab, vocab),))
    table = TensorSpec(f"{prefix}embed_tokens_per_layer.weight", (vocab, all_layers), rows, part="embedding")
    projection = whole(f"{prefix}per_layer_model_projection.weight", all_layers, shape.hidden, linear=True)
    layers = [
        (
            whole(f"{prefix}layers.{layer}.per_layer_input_gate.weight", width, shape.hidden, linear=True),
            whole(f"{prefix}layers.{layer}.per_layer_projection.weight", shape.hidden, width, linear=True),
        )
        for layer in range(shape.layers)
    ]
    return (table, projection), layers
