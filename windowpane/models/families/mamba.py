"""Mamba-2 layers, as Nemotron-H, Granite-H, Falcon-H1 and Zamba2 have them: sizes, state and tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from windowpane.kv.caches import StateCache, StatePart
from windowpane.models.blocks import Mamba2, Norm, Projection
from windowpane.models.config import Config, ModelError, is_number
from windowpane.models.parts import by_columns, with_biases
from windowpane.models.tensors import Shard, TensorSpec


@dataclass(frozen=True, slots=True)
class Mamba:
    """The sizes of a Mamba-2 layer. B and C belong to groups of heads."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    state_dtype: str | None

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_sections(self) -> tuple[tuple[int, int], ...]:
        """x, B and C, which pass through the convolution."""
        group_states = self.groups * self.state
        return ((self.inner, self.heads), (group_states, self.groups), (group_states, self.groups))

    def cache(self, layer: int) -> StateCache:
        """The convolution remembers the inputs before this token, kernel - 1 of them, in the compute dtype."""
        remembered = self.kernel - 1
        return StateCache(
            layer,
            (
                StatePart("conv_x", self.heads, self.head_dim * remembered),
                StatePart("conv_bc", self.groups, 2 * self.state * remembered),
                StatePart("recurrent", self.heads, self.head_dim * self.state, self.state_dtype),
            ),
        )

    def mixer(
        self,
        prefix: str,
        hidden: int,
        layer: int,
        eps: float,
        *,
        in_bias: bool = False,
        out_bias: bool = False,
        conv_bias: bool = True,
        norm: bool = True,
        **rest: Any,
    ) -> Mamba2:
        """The layer over tensors that begin with `prefix`; `rest` are other fields of `Mamba2`."""
        conv = Shard(0, self.conv_sections)
        conv_rows = sum(length for length, _ in self.conv_sections)
        per_head = Shard(0, ((self.heads, self.heads),))
        # The input projection yields the gate z, then x, B and C, then one step size per head.
        sections = ((self.inner, self.heads), *self.conv_sections, (self.heads, self.heads))
        in_rows = sum(length for length, _ in sections)
        in_proj = TensorSpec(
            f"{prefix}in_proj.weight", (in_rows, hidden), Shard(0, sections), linear=True, part="state"
        )
        out_proj = by_columns(f"{prefix}out_proj.weight", hidden, self.inner, self.heads, "state")
        inner = Shard(0, ((self.inner, self.heads),))
        dt_bias, a_log, skip = (
            TensorSpec(f"{prefix}{name}", (self.heads,), per_head, part="state") for name in ("dt_bias", "A_log", "D")
        )
        return Mamba2(
            layer,
            self.cache(layer),
            Projection.of(with_biases([in_proj]) if in_bias else [in_proj]),
            conv=TensorSpec(f"{prefix}conv1d.weight", (conv_rows, 1, self.kernel), conv, part="state"),
            conv_bias=TensorSpec(f"{prefix}conv1d.bias", (conv_rows,), conv, part="state") if conv_bias else None,
            a_log=a_log,
            dt_bias=dt_bias,
            skip=skip,
            out=Projection.of(with_biases([out_proj]) if out_bias else [out_proj]),
            norm=Norm(eps, TensorSpec(f"{prefix}norm.weight", (self.inner,), inner, part="state")) if norm else None,
            **rest,
        )


def read_dt_limits(config: Config) -> tuple[float, float]:
    """Bounds of a Mamba-2 step size; configs may leave them out, or write the upper one as a word for infinity."""
    values = config.fields.get("time_step_limit")
    if values is None:
        return 0.0, math.inf
    if isinstance(values, list | tuple) and len(values) == 2:
        low, high = values
        if is_number(low) and low >= 0:
            if high in ("Infinity", "inf", math.inf):
                return float(low), math.inf
            if is_number(high) and low <= high:
                return float(low), float(high)
    raise config.wrong_type("time_step_limit", "two numbers, the lower bound first and none below 0")


def read_heads(config: Config, heads_key: str, groups_key: str, default_groups: int | None = None) -> tuple[int, int]:
    """The heads and the groups that share their B and C, under the family's names of them."""
    heads, groups = config.integer(heads_key), config.integer(groups_key, default_groups)
    if heads % groups:
        raise ModelError(f"{config.where}{heads_key} is {heads}, no multiple of {groups_key}, {groups}")
    return heads, groups


def read_mamba_d(config: Config, inner: int) -> Mamba:
    """Sizes under the names that Granite-H and Falcon-H1 use; a head size of "auto" shares `inner` evenly."""
    heads, groups = read_heads(config, "mamba_n_heads", "mamba_n_groups", 1)
    auto = config.fields.get("mamba_d_head", "auto") == "auto"
    head_dim = inner // heads if auto else config.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise ModelError(f"{heads} mamba_n_heads of {head_dim} are not the {inner} channels of the Mamba layers")
    return Mamba(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state=config.integer("mamba_d_state"),
        kernel=config.integer("mamba_d_conv", minimum=2),
        state_dtype=config.dtype("mamba_ssm_cache_dtype"),
    )
