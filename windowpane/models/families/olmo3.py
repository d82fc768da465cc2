"""OLMo 3 and EXAONE 4: three sliding layers to a full one, normed queries and keys, norms only after each block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from windowpane.models.blocks import Attention, Norm
from windowpane.models.building import Norms, attention, decoder, described_spec, gated_mlp
from windowpane.models.config import Config, ModelError, every
from windowpane.models.parts import FULL, SLIDING, Shape, even_head_dim, read_shape, retention
from windowpane.models.rope import Rope, read_rope, read_ropes
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = ("Olmo3ForCausalLM", "Exaone4ForCausalLM")
DEFAULT_WINDOW = 4096
# transformers gives a `rope_theta` beside the layer types to full layers alone.
OLMO_THETAS = {FULL: ("rope_theta", 5e5), SLIDING: ("", 5e5)}
PATTERN_LETTERS = {"L": SLIDING, "G": FULL}


def read(config: Config, name: str) -> ModelSpec:
    is_olmo = config.texts("architectures") == ("Olmo3ForCausalLM",)
    defaults = {"head_dim": even_head_dim(config), "num_key_value_heads": config.integer("num_attention_heads")}
    shape = read_shape(config, config, tied=False, defaults=defaults)
    rule = every(4, FULL, SLIDING, shape.layers) if is_olmo else _exaone_rule(config, shape.layers)
    kinds = config.layer_types(shape.layers, (FULL, SLIDING), rule)
    ropes: Mapping[str, Rope | None] = (
        read_ropes(config, shape.head_dim, shape.max_position, OLMO_THETAS) if is_olmo else _exaone_ropes(config, shape)
    )
    norms = Norms(shape.hidden, config.number("rms_norm_eps", 1e-5))
    width, activation = config.integer("intermediate_size"), config.text("hidden_act") or "silu"
    layers = []
    for layer, kind in enumerate(kinds):
        prefix = f"model.layers.{layer}."
        mixer = attention(
            f"{prefix}self_attn.",
            shape,
            shape.cache(layer, retention(kind, config, DEFAULT_WINDOW)),
            rope=ropes[kind],
            bias=is_olmo and config.flag("attention_bias", False),
            head_norms=norms.of_heads(shape.head_dim),
        )
        if is_olmo:
            mixer = _normed_across_heads(mixer, shape)
        layers.append(norms.post(prefix, mixer, gated_mlp(f"{prefix}mlp.", shape, width, activation)))
    described = decoder("model.", shape, layers, norms("model.norm"))
    return described_spec(config, config, shape, name=name, family="olmo3", decoder=described)


def _exaone_ropes(config: Config, shape: Shape) -> dict[str, Rope | None]:
    """Where there are windows, full layers have no rotary positions."""
    rope = read_rope(config, shape.head_dim, shape.max_position)
    has_windows = config.fields.get("sliding_window", DEFAULT_WINDOW) is not None
    return {FULL: None if has_windows else rope, SLIDING: rope}


def _normed_across_heads(mixer: Attention, shape: Shape) -> Attention:
    """OLMo norms all heads of a token together, so that the weight is as wide as the projection."""

    def widened(norm: Norm | None, heads: int) -> Norm:
        assert norm is not None and norm.weight is not None
        width = heads * shape.head_dim
        weight = TensorSpec(norm.weight.name, (width,), Shard(0, ((width, heads),)))
        return replace(norm, weight=weight, across_heads=True)

    return replace(mixer, q_norm=widened(mixer.q_norm, shape.query_heads), k_norm=widened(mixer.k_norm, shape.kv_heads))


def _exaone_rule(config: Config, layers: int) -> Iterable[str]:
    """A number (every n-th layer is full), letters that repeat (the last layer is full), or no window at all."""
    if config.fields.get("sliding_window", DEFAULT_WINDOW) is None:
        return (FULL,) * layers
    pattern = config.fields.get("sliding_window_pattern", 4)
    if not isinstance(pattern, str):
        return every(config.integer("sliding_window_pattern", 4), FULL, SLIDING, layers)
    if not pattern or not set(pattern) <= PATTERN_LETTERS.keys():
        raise ModelError(f"{config.where}sliding_window_pattern must be letters L and G, not {pattern!r}")
    kinds = [PATTERN_LETTERS[pattern[layer % len(pattern)]] for layer in range(layers)]
    return (*kinds[:-1], FULL)
