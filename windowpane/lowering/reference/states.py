"""Mixers with a recurrent state in plain torch. Their `keep` advances the states over all rows and leaves, for the
mixer's call, what the wanted rows read.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from windowpane.device.pages import StatePlan
from windowpane.lowering.linear import summed
from windowpane.lowering.reference.context import Context, StepState
from windowpane.lowering.reference.recurrence import causal_convolution, gated_delta_rule, mamba2_scan
from windowpane.models.blocks import GatedDeltaNet, Mamba2, ShortConv
from windowpane.schedule.step import Step

# Inputs [sequences, tokens, channels] and states [sequences, heads, elements] → outputs and states.
Advance = Callable[[torch.Tensor, list[torch.Tensor]], tuple[torch.Tensor, list[torch.Tensor]]]


class _Run(NamedTuple):
    """Rows of sequences that have as many tokens each. `goes_on`: they follow those of the run before."""

    rows: slice
    sequences: slice
    tokens: int
    goes_on: bool = False


def _runs(step: Step, plan: StatePlan) -> Iterator[_Run]:
    decoding = step.num_decoding
    if decoding:
        yield _Run(slice(0, decoding), slice(0, decoding), 1)
    for index, segment in enumerate(step.segments, start=decoding):
        row = segment.row
        for stop in plan.stops[plan.first_leaves[index] : plan.first_leaves[index + 1]]:
            yield _Run(slice(row, stop), slice(index, index + 1), stop - row, row > segment.row)
            row = stop


def advance_states(layer: int, inputs: torch.Tensor, state: StepState, advance: Advance) -> torch.Tensor:
    """Outputs of all rows, from the states before this step; those that it leaves are stored."""
    stored = state.pages.states[layer]
    before, outputs, after = stored.load(state.step), [], list[list[torch.Tensor]]()
    for run in _runs(state.step, stored.plan(state.step)):
        of_run = inputs[run.rows].unflatten(0, (-1, run.tokens))
        out, states = advance(of_run, after[-1] if run.goes_on else [part[run.sequences] for part in before])
        outputs.append(out.flatten(0, 1))
        after.append(states)
    stored.store(state.step, [_joined(parts) for parts in zip(*after, strict=True)])
    return _joined(outputs)


def _joined(parts: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _tail(parts: list[torch.Tensor], width: int) -> torch.Tensor:
    """[sequences, channels, width - 1] from the parts of a convolution's state."""
    return _as_one([part.unflatten(2, (-1, width - 1)).flatten(1, 2) for part in parts])


def _as_one(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _split_tail(tail: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """A tail in parts of these shapes."""
    flat = tail.flatten(1).split([part[0].numel() for part in parts], dim=1)
    return [piece.view(part.shape) for piece, part in zip(flat, parts, strict=True)]


class GatedDeltaMixer:
    def __init__(self, described: GatedDeltaNet, context: Context) -> None:
        parameters = context.parameters
        self.described, self._context, self._ops = described, context, context.ops
        self.inputs, self.out = parameters.linear(described.inputs), parameters.linear(described.out)
        self.conv = parameters.tensor(described.conv).float().squeeze(1)
        self.decay = parameters.tensor(described.a_log).float().exp()
        self.dt_bias = parameters.tensor(described.dt_bias).float()
        self.norm = parameters.norm(described.norm)
        self._channels, self._values = len(self.conv), described.value_heads * described.value_dim

    def __call__(self, x: torch.Tensor, state: StepState) -> torch.Tensor:
        channels, behind = self._channels, self._channels + self._values
        read = state.read.pop(self.described.layer, None)
        if read is None:
            made = self._ops.linear(x, self.inputs)
            gates = made[:, channels:behind]
            read = self._read(made[:, :channels], made[:, behind:], state)
        else:
            gates = self._ops.linear(x, self.inputs[channels:behind])
        return summed(self._ops.linear, self._gated(read, gates).to(x.dtype), self.out, self._context.group)

    def _gated(self, read: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        normed = self._ops.norm(read, self.norm, self.described.norm)
        return (normed * F.silu(gates.float()).view(normed.shape)).flatten(1)

    def keep(self, x: torch.Tensor, state: StepState) -> None:
        first, last = self.inputs[: self._channels], self.inputs[self._channels + self._values :]
        read = self._read(self._ops.linear(x, first), self._ops.linear(x, last), state)
        state.read[self.described.layer] = read[state.wanted]

    def _read(self, qkv: torch.Tensor, rates_and_steps: torch.Tensor, state: StepState) -> torch.Tensor:
        """[rows, value heads, dim] of q, k and v, and of b and a."""
        made = torch.cat([qkv, rates_and_steps], dim=1)
        return advance_states(self.described.layer, made, state, self._advance)

    def _advance(self, made: torch.Tensor, states: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        described, (*tails, recurrent) = self.described, states
        key_heads, heads, dim = described.key_heads, described.value_heads, described.key_dim
        qkv, rates, steps = made.split([self._channels, heads, heads], dim=-1)
        mixed, tail = causal_convolution(qkv, _tail(tails, self.conv.shape[1]), self.conv, None)
        widths = [key_heads * dim, key_heads * dim, self._values]
        queries, keys, values = (part.unflatten(-1, (-1, width)) for part, width in zip(
            F.silu(mixed).split(widths, dim=-1), (dim, dim, described.value_dim), strict=True
        ))  # fmt: skip
        if heads > key_heads:
            queries, keys = (part.repeat_interleave(heads // key_heads, dim=2) for part in (queries, keys))
        log_decays = -self.decay * F.softplus(steps.float() + self.dt_bias)
        matrices = recurrent.unflatten(2, (dim, described.value_dim))
        read, matrices = gated_delta_rule(queries, keys, values, log_decays, rates.float().sigmoid(), matrices)
        return read, [*_split_tail(tail, tails), matrices.flatten(2)]


class Mamba2Mixer:
    def __init__(self, described: Mamba2, context: Context) -> None:
        parameters = context.parameters
        self.described, self._context, self._ops = described, context, context.ops
        self.inputs, self.out = parameters.linear(described.inputs), parameters.linear(described.out)
        self.conv = parameters.tensor(described.conv).float().squeeze(1)
        bias = described.conv_bias
        self.conv_bias = None if bias is None else parameters.tensor(bias).float()
        self.rates = parameters.tensor(described.a_log).float().exp()
        self.dt_bias, self.skip = (parameters.tensor(t).float() for t in (described.dt_bias, described.skip))
        self.norm = parameters.norm(described.norm)
        self._inner, self._states = described.heads * described.head_dim, described.groups * described.state_dim
        self._multipliers = self._spread_multipliers()

    def _spread_multipliers(self) -> torch.Tensor | None:
        if self.described.multipliers is None:
            return None
        widths = [self._inner, self._inner, self._states, self._states, self.described.heads]
        factors = [torch.full((w,), m) for w, m in zip(widths, self.described.multipliers, strict=True)]
        return torch.cat(factors).to(self.conv.device)

    def __call__(self, x: torch.Tensor, state: StepState) -> torch.Tensor:
        y = state.read.pop(self.described.layer, None)
        if y is None:
            made = self._made(x, 0, self.inputs.outputs)
            y, gates = self._read(made[:, self._inner :], state), made[:, : self._inner]
        else:
            gates = self._made(x, 0, self._inner)
        return summed(self._ops.linear, self._gated(y, gates).to(x.dtype), self.out, self._context.group)

    def keep(self, x: torch.Tensor, state: StepState) -> None:
        made = self._made(x, self._inner, self.inputs.outputs)
        state.read[self.described.layer] = self._read(made, state)[state.wanted]

    def _made(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Some of the projection's outputs."""
        made = self._ops.linear(x, self.inputs[start:stop])
        return made if self._multipliers is None else (made * self._multipliers[start:stop]).to(made.dtype)

    def _gated(self, y: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        norm, gates = self.described.norm, F.silu(gates.float())
        if norm is None:
            return y * gates
        if self.described.norms_first:
            return self._normed(y, norm.eps) * gates
        return self._normed(y * gates, norm.eps)

    def _normed(self, y: torch.Tensor, eps: float) -> torch.Tensor:
        """Ranks hold equal parts of what is normed together, unless each has groups of its own."""
        described, group = self.described, self._context.group
        parts = y.unflatten(1, (described.groups if described.norms_groups else 1, -1))
        means = parts.square().mean(-1, keepdim=True)
        if not described.norms_groups:
            means = group.all_reduce(means) / group.place.ranks
        normed: torch.Tensor = (parts * torch.rsqrt(means + eps)).flatten(1)
        return normed if self.norm is None else normed * self.norm

    def _read(self, made: torch.Tensor, state: StepState) -> torch.Tensor:
        """[rows, heads × dim] of x, B, C and dt."""
        return advance_states(self.described.layer, made, state, self._advance).flatten(1)

    def _advance(self, made: torch.Tensor, states: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        described, (*tails, recurrent) = self.described, states
        xbc, steps = made.split([len(self.conv), described.heads], dim=-1)
        mixed, tail = causal_convolution(xbc, _tail(tails, self.conv.shape[1]), self.conv, self.conv_bias)
        x, write, read = F.silu(mixed).split([self._inner, self._states, self._states], dim=-1)
        x = x.unflatten(-1, (described.heads, -1))
        write, read = (part.unflatten(-1, (described.groups, -1)) for part in (write, read))
        steps = F.softplus(steps.float() + self.dt_bias).clamp(*described.dt_limits)
        matrices = recurrent.unflatten(2, (described.head_dim, described.state_dim))
        y, matrices = mamba2_scan(x, write, read, steps, self.rates, matrices)
        return y + self.skip[:, None] * x, [*_split_tail(tail, tails), matrices.flatten(2)]


class ShortConvMixer:
    def __init__(self, described: ShortConv, context: Context) -> None:
        parameters = context.parameters
        self.described, self._context, self._ops = described, context, context.ops
        self.inputs, self.out = parameters.linear(described.inputs), parameters.linear(described.out)
        self.conv = parameters.tensor(described.conv).float().squeeze(1)
        bias = described.conv_bias
        self.conv_bias = None if bias is None else parameters.tensor(bias).float()

    def __call__(self, x: torch.Tensor, state: StepState) -> torch.Tensor:
        width = len(self.conv)
        mixed = state.read.pop(self.described.layer, None)
        if mixed is None:
            before, behind, inner = self._ops.linear(x, self.inputs).split(width, dim=1)
            mixed = self._mixed(before, inner, state)
        else:
            behind = self._ops.linear(x, self.inputs[width : 2 * width])
        return summed(self._ops.linear, (behind * mixed).to(x.dtype), self.out, self._context.group)

    def keep(self, x: torch.Tensor, state: StepState) -> None:
        width = len(self.conv)
        before, inner = (self._ops.linear(x, self.inputs[at : at + width]) for at in (0, 2 * width))
        state.read[self.described.layer] = self._mixed(before, inner, state)[state.wanted]

    def _mixed(self, before: torch.Tensor, inner: torch.Tensor, state: StepState) -> torch.Tensor:
        """[rows, channels] of B and x."""
        return advance_states(self.described.layer, before * inner, state, self._advance)

    def _advance(self, inputs: torch.Tensor, states: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        mixed, tail = causal_convolution(inputs, _tail(states, self.conv.shape[1]), self.conv, self.conv_bias)
        return mixed, _split_tail(tail, states)
