"""Jamba: Mamba-1 layers with a full layer every eighth, and experts on every second."""

from __future__ import annotations

from dataclasses import dataclass

from windowpane.kv.caches import StateCache, StatePart, TokenCache
from windowpane.kv.retention import Full, ceil_div
from windowpane.models.config import Config, ModelError
from windowpane.models.parts import (
    attention_tensors,
    by_columns,
    by_rows,
    embeddings,
    even_head_dim,
    experts_per_token,
    mlp_tensors,
    model_spec,
    norms,
    read_shape,
    separate_experts,
    whole,
    with_biases,
)
from windowpane.models.spec import ModelSpec
from windowpane.models.tensors import Shard, TensorSpec

ARCHITECTURES = ("JambaForCausalLM",)


@dataclass(frozen=True, slots=True)
class Mamba1:
    """The sizes of a Mamba-1 layer: every channel has a state of its own, so ranks split channels."""

    inner: int
    state: int
    kernel: int
    step_rank: int

    def cache(self, layer: int) -> StateCache:
        """The convolution remembers kernel - 1 inputs. The config names no dtype for the state: the compute dtype."""
        return StateCache(
            layer,
            (StatePart("conv", self.inner, self.kernel - 1), StatePart("recurrent", self.inner, self.state)),
        )

    def tensors(self, prefix: str, hidden: int, *, bias: bool, conv_bias: bool) -> list[TensorSpec]:
        channels = Shard(0, ((self.inner, self.inner),))
        halves = Shard(0, ((self.inner, self.inner), (self.inner, self.inner)))
        projections = [
            TensorSpec(f"{prefix}in_proj.weight", (2 * self.inner, hidden), halves, linear=True, part="state"),
            by_columns(f"{prefix}out_proj.weight", hidden, self.inner, self.inner, "state"),
        ]
        conv = [TensorSpec(f"{prefix}conv1d.weight", (self.inner, 1, self.kernel), channels, part="state")]
        if conv_bias:
            conv.append(TensorSpec(f"{prefix}conv1d.bias", (self.inner,), channels, part="state"))
        selected = self.step_rank + 2 * self.state  # step size, B and C of a token
        return [
            *(with_biases(projections) if bias else projections),
            *conv,
            by_columns(f"{prefix}x_proj.weight", selected, self.inner, self.inner, "state"),
            *with_biases([by_rows(f"{prefix}dt_proj.weight", self.inner, self.step_rank, self.inner, "state")]),
            TensorSpec(f"{prefix}A_log", (self.inner, self.state), channels, part="state"),
            TensorSpec(f"{prefix}D", (self.inner,), channels, part="state"),
            *norms(prefix, ("dt_layernorm",), self.step_rank),
            *norms(prefix, ("b_layernorm", "c_layernorm"), self.state),
        ]


def read(config: Config, name: str) -> ModelSpec:
    if config.has("sliding_window"):
        raise ModelError("sliding_window is set, but Jamba's attention layers are known only as full ones")
    shape = read_shape(config, config, tied=False, defaults={"head_dim": even_head_dim(config)})
    mamba = _mamba(config, shape.hidden)
    full = _every(config, "attn_layer", 8, 4, shape.layers)
    experts = config.integer("num_experts", 16)
    sparse = _every(config, "expert_layer", 2, 1, shape.layers) if experts > 1 else frozenset()
    width = config.integer("intermediate_size")
    bias, conv_bias = config.flag("mamba_proj_bias", False), config.flag("mamba_conv_bias", True)
    caches: list[TokenCache | StateCache] = []
    tensors: list[TensorSpec] = embeddings("model.", shape)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        if layer in full:
            caches.append(shape.cache(layer, Full()))
            tensors += attention_tensors(f"{prefix}self_attn.", shape)
        else:
            caches.append(mamba.cache(layer))
            tensors += mamba.tensors(f"{prefix}mamba.", shape.hidden, bias=bias, conv_bias=conv_bias)
        if layer in sparse:
            tensors.append(whole(f"{prefix}feed_forward.router.weight", experts, shape.hidden))
            tensors += separate_experts(f"{prefix}feed_forward.experts.", experts, shape.hidden, width)
        else:
            tensors += mlp_tensors(f"{prefix}feed_forward.", shape.hidden, width)
        tensors += norms(prefix, ("input_layernorm", "pre_ff_layernorm"), shape.hidden)
    tensors += norms("model.", ("final_layernorm",), shape.hidden)
    return model_spec(
        config,
        config,
        shape,
        name=name,
        family="jamba",
        widest_mlp=experts_per_token(config, experts, default=2) * width if sparse else width,
        caches=caches,
        tensors=tensors,
    )


def _mamba(config: Config, hidden: int) -> Mamba1:
    auto = config.fields.get("mamba_dt_rank", "auto") == "auto"
    return Mamba1(
        inner=config.integer("mamba_expand", 2) * hidden,
        state=config.integer("mamba_d_state", 16),
        kernel=config.integer("mamba_d_conv", 4, minimum=2),
        step_rank=ceil_div(hidden, 16) if auto else config.integer("mamba_dt_rank"),
    )


def _every(config: Config, what: str, period: int, offset: int, layers: int) -> frozenset[int]:
    """Layers `offset`, `offset + period` and so on; the defaults are the config class's."""
    period = config.integer(f"{what}_period", period)
    offset = config.integer(f"{what}_offset", offset, minimum=0)
    if offset >= period:
        raise ModelError(f"{what}_offset is {offset}, but must be below {what}_period, {period}")
    return frozenset(range(offset, layers, period))
