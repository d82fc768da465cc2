"""Qwen3-Next, 3.5, 3.6 and 3.8: three gated-delta layers, which keep a state, to one full layer with gated queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windowpane.kv.caches import StateCache, StatePart
from windowpane.kv.retention import Full
from windowpane.models.blocks import (
    BY_KEY_HEAD,
    BY_SECTION,
    GATES_BY_KEY_HEAD,
    TILED,
    Attention,
    Decoder,
    GatedDeltaNet,
    Join,
    Layer,
    Mixer,
    Norm,
    Projection,
    Router,
)
from windowpane.models.building import Norms, attention, beside, decoder, described_spec, experts, gated_mlp
from windowpane.models.config import Config, ModelError, every
from windowpane.models.families import towers
from windowpane.models.parts import (
    FULL,
    LINEAR,
    Shape,
    activation_problem,
    by_rows,
    experts_per_token,
    fused_experts,
    is_from_gguf,
    read_shape,
    separate_experts,
    sparse_layers,
    whole,
)
from windowpane.models.rope import read_rope
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)

DEFAULTS = {
    "vocab_size": 248_320,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
}
MOE_DEFAULTS = DEFAULTS | {"num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The sizes of a linear-attention layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_dtype: str | None

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def qkv_sections(self) -> tuple[tuple[int, int], ...]:
        return ((self.keys, self.key_heads), (self.keys, self.key_heads), (self.values, self.value_heads))

    def cache(self, layer: int) -> StateCache:
        """The convolution remembers the inputs before this token, kernel - 1 of them, in the compute dtype."""
        remembered = self.kernel - 1
        return StateCache(
            layer,
            (
                StatePart("conv_q", self.key_heads, self.key_dim * remembered),
                StatePart("conv_k", self.key_heads, self.key_dim * remembered),
                StatePart("conv_v", self.value_heads, self.value_dim * remembered),
                StatePart("recurrent", self.value_heads, self.key_dim * self.value_dim, self.state_dtype),
            ),
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """What the layers of one model are made of, its own and those that draft."""

    text: Config
    shape: Shape
    is_next: bool
    has_experts: bool
    is_quantized: bool
    is_from_gguf: bool

    @property
    def delta_order(self) -> str:
        if self.is_next:
            return GATES_BY_KEY_HEAD if self.is_from_gguf else BY_KEY_HEAD
        return TILED if self.is_from_gguf else BY_SECTION

    @property
    def norms(self) -> Norms:
        return Norms(self.shape.hidden, self.text.number("rms_norm_eps", 1e-6), adds_one=True)

    @property
    def activation(self) -> str:
        return self.text.text("hidden_act") or "silu"

    def attention(self, at: str, layer: int) -> Attention:
        return attention(
            f"{at}self_attn.",
            self.shape,
            self.shape.cache(layer, Full()),
            rope=read_rope(self.text, self.shape.head_dim, self.shape.max_position, partial=0.25),
            bias=self.text.flag("attention_bias", False),
            head_norms=self.norms.of_heads(self.shape.head_dim),
            gated=True,
        )

    def mlp(self, at: str, layer: int, sparse: bool) -> Mixer:
        if not sparse:
            return gated_mlp(f"{at}mlp.", self.shape, self.text.integer("intermediate_size"), self.activation)
        # Unquantized Qwen3.5 checkpoints fuse the experts of a layer; Qwen3-Next, quantized ones and GGUF do not.
        fused = not (self.is_next or self.is_quantized or self.is_from_gguf)
        renormalizes = not self.is_next or self.text.flag("norm_topk_prob", True)
        return _experts(
            f"{at}mlp.", self.text, self.shape, layer, self.activation, fused=fused, renormalizes=renormalizes
        )


def read(config: Config, name: str) -> ModelSpec:
    nested = config.has("text_config")
    text = config.section("text_config") if nested else config
    architecture = (config.texts("architectures") or ("",))[0]
    _refuse_other_gates(text)
    parts = _parts(architecture, config, text)
    shape, delta = parts.shape, _gated_delta(text)
    interval = text.integer("full_attention_interval", 4)
    kinds = text.layer_types(shape.layers, (FULL, LINEAR), every(interval, FULL, LINEAR, shape.layers))
    sparse = sparse_layers(text, shape.layers) if parts.has_experts else frozenset()
    prefix = "model.language_model." if nested else "model."
    layers = []
    for layer, kind in enumerate(kinds):
        at = f"{prefix}layers.{layer}."
        if kind == FULL:
            mixer: Mixer = parts.attention(at, layer)
        else:
            eps, order = parts.norms.eps, parts.delta_order
            mixer = _linear_attention(f"{at}linear_attn.", delta, layer, shape.hidden, eps, order)
        layers.append(parts.norms.pre(at, mixer, parts.mlp(at, layer, layer in sparse)))
    described = decoder(prefix, shape, layers, parts.norms(f"{prefix}norm"))
    seen = towers.qwen3_5(config) if nested and config.has("vision_config") else ()
    problem = activation_problem(text, "hidden_act") if LINEAR in kinds else ""
    return described_spec(
        config, text, shape, name=name, family="qwen3_next", decoder=described, towers=seen, planned_only=problem
    )


def _refuse_other_gates(text: Config) -> None:
    """Every released model has a gate on full layers, and SiLU in that of linear ones, under either of its names."""
    if not text.flag("attn_output_gate", True):
        raise ModelError(
            f"{text.where}attn_output_gate is false, but full layers of this family are known only with a gate"
        )
    text.choice("output_gate_type", ("silu", "swish"))


def _parts(architecture: str, config: Config, text: Config) -> Parts:
    is_next = architecture == "Qwen3NextForCausalLM"
    has_experts = is_next or "Moe" in architecture
    defaults = None if is_next else MOE_DEFAULTS if has_experts else DEFAULTS
    shape = read_shape(config, text, tied=False, defaults=defaults)
    return Parts(text, shape, is_next, has_experts, config.has("quantization_config"), is_from_gguf(config))


def draft_layers(target: ModelSpec) -> Decoder:
    """The layer for multi-token prediction: it reads a token and the final hidden state of the one before it.

    Its cache holds, at a token's position, what it makes of that token's hidden state and the next token.
    """
    assert target.decoder is not None
    text, layer, at = target.text, target.num_layers, "mtp.layers.0."
    count = text.integer("mtp_num_hidden_layers", text.integer("num_nextn_predict_layers", 1, minimum=0), minimum=0)
    if count != 1:
        raise ModelError(f"{target.name} has {count} layers for multi-token prediction, and drafts need exactly one")
    parts = replace(_parts(target.architecture, text, text), is_quantized=target.quantization is not None)
    norms, hidden = parts.norms, parts.shape.hidden
    join = Join(
        Projection.of([whole("mtp.fc.weight", hidden, 2 * hidden, linear=True)]),
        norms("mtp.pre_fc_norm_embedding"),
        norms("mtp.pre_fc_norm_hidden"),
    )
    blocks = norms.pre(at, parts.attention(at, layer), parts.mlp(at, layer, parts.has_experts))
    return replace(
        target.decoder, layers=(Layer(blocks),), norm=norms("mtp.norm"), join=join, routes=None, first_layer=layer
    )


def _gated_delta(text: Config) -> GatedDelta:
    delta = GatedDelta(
        key_heads=text.integer("linear_num_key_heads", 16),
        value_heads=text.integer("linear_num_value_heads", 32),
        key_dim=text.integer("linear_key_head_dim", 128),
        value_dim=text.integer("linear_value_head_dim", 128),
        kernel=text.integer("linear_conv_kernel_dim", 4, minimum=2),
        state_dtype=text.dtype("mamba_ssm_dtype"),
    )
    if delta.value_heads % delta.key_heads:
        raise ModelError(
            f"{text.where}linear_num_value_heads is {delta.value_heads}, "
            f"no multiple of linear_num_key_heads, {delta.key_heads}"
        )
    return delta


def _linear_attention(prefix: str, delta: GatedDelta, layer: int, hidden: int, eps: float, order: str) -> GatedDeltaNet:
    """Qwen3-Next fuses q, k, v and the gate by key head; later models only q|k|v, one after another."""
    # Ranks share key heads out. Where value heads are tiled, each run of one value head per key head is cut by itself.
    runs = delta.value_heads // delta.key_heads if order == TILED else 1
    units = delta.value_heads // runs
    values = ((delta.values // runs, units),) * runs
    qkv = Shard(0, (*delta.qkv_sections[:2], *values))
    qkv_rows = sum(length for length, _ in delta.qkv_sections)
    heads = Shard(0, ((units, units),) * runs)
    if order == BY_KEY_HEAD:
        inputs = [by_rows(f"{prefix}in_proj_qkvz.weight", qkv_rows + delta.values, hidden, delta.key_heads, "state")]
    else:
        inputs = [
            TensorSpec(f"{prefix}in_proj_qkv.weight", (qkv_rows, hidden), qkv, linear=True, part="state"),
            TensorSpec(
                f"{prefix}in_proj_z.weight", (delta.values, hidden), Shard(0, values), linear=True, part="state"
            ),
        ]
    if order in (BY_KEY_HEAD, GATES_BY_KEY_HEAD):
        inputs.append(by_rows(f"{prefix}in_proj_ba.weight", 2 * delta.value_heads, hidden, delta.key_heads, "state"))
    else:
        inputs += [
            TensorSpec(f"{prefix}in_proj_{name}.weight", (delta.value_heads, hidden), heads, linear=True, part="state")
            for name in "ba"
        ]
    out = TensorSpec(f"{prefix}out_proj.weight", (hidden, delta.values), Shard(1, values), linear=True, part="state")
    return GatedDeltaNet(
        layer,
        delta.cache(layer),
        Projection.of(inputs),
        conv=TensorSpec(f"{prefix}conv1d.weight", (qkv_rows, 1, delta.kernel), qkv, part="state"),
        a_log=TensorSpec(f"{prefix}A_log", (delta.value_heads,), heads, part="state"),
        dt_bias=TensorSpec(f"{prefix}dt_bias", (delta.value_heads,), heads, part="state"),
        norm=Norm(eps, whole(f"{prefix}norm.weight", delta.value_dim)),
        out=Projection.of([out]),
        order=order,
    )


def _experts(
    prefix: str, text: Config, shape: Shape, layer: int, activation: str, *, fused: bool, renormalizes: bool
) -> Mixer:
    count, width = text.integer("num_experts"), text.integer("moe_intermediate_size", 512)
    sizes = f"{prefix}experts.", count, shape.hidden, width
    tensors = fused_experts(*sizes, transposed=False) if fused else separate_experts(*sizes)
    router = Router(
        whole(f"{prefix}gate.weight", count, shape.hidden),
        experts_per_token(text, count),
        renormalizes=renormalizes,
    )
    shared = gated_mlp(
        f"{prefix}shared_expert.", shape, text.integer("shared_expert_intermediate_size", 512), activation
    )
    gate = Projection.of([whole(f"{prefix}shared_expert_gate.weight", 1, shape.hidden)])
    return beside(experts(layer, router, tensors, activation), replace(shared, out_gate=gate))
