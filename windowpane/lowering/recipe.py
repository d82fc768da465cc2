"""What distinguishes one decoder from another, read from a spec: one function per family, one decoder for all.

A family that fits these fields needs no torch code of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from windowpane.attention.mask import Mask
from windowpane.kv.caches import TokenCache
from windowpane.kv.retention import Cross
from windowpane.lowering.rope import Rope, read_rope
from windowpane.models.families import gemma3, gemma4
from windowpane.models.parts import FULL, SLIDING
from windowpane.models.spec import ModelError, ModelSpec

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """`kv_layer` is the layer whose cache and present K and V this one reads: itself, or the one it shares with."""

    index: int
    kv_layer: int
    query_heads: int
    kv_heads: int
    head_dim: int
    mask: Mask
    rope: Rope
    scale: float
    latent: bool

    @classmethod
    def over(
        cls, cache: TokenCache, spec: ModelSpec, rope: Rope, scale: float, index: int | None = None
    ) -> LayerRecipe:
        """A layer that reads this cache: its owner, or the layer `index` that shares it."""
        assert not isinstance(cache.retention, Cross), "decoders without an encoder"
        return cls(
            index=cache.layer if index is None else index,
            kv_layer=cache.layer,
            query_heads=spec.query_heads,
            kv_heads=cache.kv_heads,
            head_dim=cache.key_dim,
            mask=Mask(cache.retention),
            rope=rope,
            scale=scale,
            latent=cache.latent,
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """`norms_add_one`: the checkpoint stores w − 1. `sandwich`: blocks are normed before and after."""

    prefix: str
    head: str | None
    layers: tuple[LayerRecipe, ...]
    hidden_size: int
    norm_eps: float
    activation: str
    norms_add_one: bool = False
    sandwich: bool = False
    qk_norm: bool = False
    v_norm: bool = False
    layer_scalars: bool = False
    per_layer_width: int = 0
    embedding_scale: float = 1.0
    final_softcap: float | None = None

    @property
    def last_kv_owner(self) -> int:
        """Nothing after this layer changes what later tokens see."""
        return max(layer.kv_layer for layer in self.layers)


def read_recipe(spec: ModelSpec) -> Recipe:
    """How to run this model; a ModelError where it cannot be run yet."""
    reader = _FAMILIES.get(spec.family)
    if reader is None:
        raise ModelError(
            f"{spec.name} ({spec.architecture}) can be planned but not run yet; "
            f"families that run: {', '.join(sorted(_FAMILIES))}"
        )
    return reader(spec)


def _llama(spec: ModelSpec) -> Recipe:
    """Llama 3, SmolLM2, Mistral and dense Qwen3: the same decoder with and without normed queries and keys."""
    text = spec.text
    if any("experts" in t.name for t in spec.tensors):
        raise ModelError(f"{spec.name} has experts, which cannot be run yet")
    head_dim = spec.token_caches[0].key_dim
    no_rope = text.integers("no_rope_layers") or (1,) * spec.num_layers
    rope = read_rope(text, head_dim, FULL, Rope("default", head_dim))
    layers = tuple(
        LayerRecipe.over(c, spec, rope if no_rope[c.layer] else Rope(None, head_dim), head_dim**-0.5)
        for c in spec.token_caches
    )
    return Recipe(
        prefix=_prefix(spec),
        head=_head(spec),
        layers=layers,
        hidden_size=spec.hidden_size,
        norm_eps=text.number("rms_norm_eps", 1e-6),
        activation=text.choice("hidden_act", ACTIVATIONS) or "silu",
        qk_norm=any(t.name.endswith("layers.0.self_attn.q_norm.weight") for t in spec.tensors),
    )


def _gemma3(spec: ModelSpec) -> Recipe:
    text = spec.text
    kinds = gemma3.layer_kinds(text, spec.num_layers)
    head_dim = spec.token_caches[0].key_dim
    ropes = {
        FULL: read_rope(text, head_dim, FULL, Rope("default", head_dim, theta=1e6)),
        SLIDING: read_rope(text, head_dim, SLIDING, Rope("default", head_dim), theta_key="rope_local_base_freq"),
    }
    scale = text.number("query_pre_attn_scalar", 256) ** -0.5
    layers = tuple(LayerRecipe.over(c, spec, ropes[kinds[c.layer]], scale) for c in spec.token_caches)
    return Recipe(
        prefix=_prefix(spec),
        head=_head(spec),
        layers=layers,
        hidden_size=spec.hidden_size,
        norm_eps=text.number("rms_norm_eps", 1e-6),
        activation=text.choice("hidden_activation", ACTIVATIONS) or "gelu_pytorch_tanh",
        norms_add_one=True,
        sandwich=True,
        qk_norm=True,
        embedding_scale=spec.hidden_size**0.5,
        final_softcap=_softcap(spec),
    )


def _gemma4(spec: ModelSpec) -> Recipe:
    text = spec.text
    if text.flag("enable_moe_block", False):
        raise ModelError(f"{spec.name} has experts, which cannot be run yet")
    kinds = gemma4.layer_kinds(text, spec.num_layers)
    owners = {cache.layer: cache for cache in spec.token_caches}
    layers = []
    for index, kind in enumerate(kinds):
        # A layer that owns no cache shares with the last owner of its own kind.
        kv_layer = index if index in owners else max(i for i in owners if kinds[i] == kind)
        cache = owners[kv_layer]
        rope = read_rope(text, cache.key_dim, kind, _gemma4_rope(kind, cache.key_dim))
        layers.append(LayerRecipe.over(cache, spec, rope, 1.0, index))
    unified = spec.architecture in gemma4.UNIFIED
    return Recipe(
        prefix=_prefix(spec),
        head=_head(spec),
        layers=tuple(layers),
        hidden_size=spec.hidden_size,
        norm_eps=text.number("rms_norm_eps", 1e-6),
        activation=text.choice("hidden_activation", ACTIVATIONS) or "gelu_pytorch_tanh",
        sandwich=True,
        qk_norm=True,
        v_norm=True,
        layer_scalars=True,
        per_layer_width=0 if unified else text.integer("hidden_size_per_layer_input", 256, minimum=0),
        embedding_scale=spec.hidden_size**0.5,
        final_softcap=_softcap(spec),
    )


def _gemma4_rope(kind: str, head_dim: int) -> Rope:
    if kind == FULL:
        return Rope("proportional", head_dim, theta=1e6, partial=0.25)
    return Rope("default", head_dim)


def _prefix(spec: ModelSpec) -> str:
    """What the text model's tensors start with: multimodal checkpoints wrap it."""
    embedding = next(t.name for t in spec.tensors if t.name.endswith("embed_tokens.weight") and not t.tower)
    return embedding.removesuffix("embed_tokens.weight")


def _head(spec: ModelSpec) -> str | None:
    """The LM head's name, None where it is the embedding."""
    return next((t.name for t in spec.tensors if t.name.endswith("lm_head.weight")), None)


def _softcap(spec: ModelSpec) -> float | None:
    return spec.text.number("final_logit_softcapping") if spec.text.has("final_logit_softcapping") else None


_FAMILIES: dict[str, Callable[[ModelSpec], Recipe]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "llama": _llama,
    "mistral": _llama,
    "qwen3": _llama,
}
