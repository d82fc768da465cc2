"""`Linear`: a projection as every lowering holds it, and `Parameters`: the tensors that a description names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from windowpane.attention.scores import Scores
from windowpane.lowering.adapters import Adapters, LinearAdapter
from windowpane.lowering.group import RankGroup
from windowpane.lowering.packed import (
    JoinedWeight,
    PackedWeight,
    Weight,
    permute_inputs,
    permute_outputs,
    stack,
    stack_in_experts,
)
from windowpane.lowering.strips import StripWeight
from windowpane.models.blocks import (
    BY_KEY_HEAD,
    BY_SECTION,
    TILED,
    Attention,
    Decoder,
    ExpertProjection,
    GatedDeltaNet,
    Norm,
    Projection,
    each,
    tensors_of,
)
from windowpane.models.tensors import TensorSpec

Weights = dict[str, torch.Tensor | PackedWeight | StripWeight]


@dataclass(frozen=True, slots=True)
class Linear:
    """x · weightᵀ + bias. It is never changed: another order or basis gives another one.

    `is_partial`: the inputs are split over ranks, so that their products are to be summed. `adapter`: what is added to
    its results, by the adapters that rows have.
    """

    weight: Weight
    bias: torch.Tensor | None = None
    is_partial: bool = False
    adapter: LinearAdapter | None = None

    @property
    def outputs(self) -> int:
        return len(self.weight)

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    def __getitem__(self, outputs: slice) -> Linear:
        """Some consecutive outputs, as views."""
        bias, adapter = (None if one is None else one[outputs] for one in (self.bias, self.adapter))
        return Linear(self.weight[outputs], bias, self.is_partial, adapter)  # type: ignore[arg-type]

    def with_outputs_permuted(self, order: torch.Tensor, count: int | None = None) -> Linear:
        """Every `len(order)` outputs (a head, say) in this order; only of the first `count` where that is given."""
        if count is not None and count < self.outputs:
            return joined(self[:count].with_outputs_permuted(order), self[count:])
        bias = None if self.bias is None else self.bias.view(-1, len(order))[:, order].reshape(-1)
        adapter = None if self.adapter is None else self.adapter.with_outputs_permuted(order)
        return replace(self, weight=permute_outputs(self.weight, order), bias=bias, adapter=adapter)

    def with_inputs_permuted(self, order: torch.Tensor) -> Linear:
        """A Linear for inputs of which every `len(order)` come in this order."""
        adapter = None if self.adapter is None else self.adapter.with_inputs_permuted(order)
        return replace(self, weight=permute_inputs(self.weight, order), adapter=adapter)

    def with_outputs_in(self, basis: torch.Tensor, first: int) -> Linear | None:
        """Outputs from `first` on in another basis, head by head; None for what cannot be changed: packed weights, and
        those that adapters add to.
        """
        if not isinstance(self.weight, torch.Tensor) or self.adapter is not None:
            return None
        dim = len(basis)
        heads = self.weight[first:].view(-1, dim, self.inputs)
        changed = (basis @ heads.float()).to(heads.dtype).view(-1, self.inputs)
        bias = self.bias
        if bias is not None:
            rows = (bias[first:].view(-1, dim).float() @ basis).to(bias.dtype)
            bias = torch.cat([bias[:first], rows.view(-1)])
        return replace(self, weight=torch.cat([self.weight[:first], changed]), bias=bias)

    def with_inputs_in(self, basis: torch.Tensor) -> Linear | None:
        """A Linear for inputs that come in another basis, head by head; None as for outputs."""
        if not isinstance(self.weight, torch.Tensor) or self.adapter is not None:
            return None
        heads = self.weight.view(self.outputs, -1, len(basis))
        return replace(self, weight=(heads.float() @ basis).to(heads.dtype).view(self.weight.shape))


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """A Linear for each expert that a rank has: `weight` has their outputs one below another [experts × outputs,
    inputs], and so has each part of a joined one; `bias` is [experts, outputs].
    """

    weight: Weight
    experts: int
    bias: torch.Tensor | None = None
    adapter: LinearAdapter | None = None

    @property
    def outputs(self) -> int:
        return len(self.weight) // self.experts

    def __getitem__(self, expert: int) -> Linear:
        parts = self.weight.parts if isinstance(self.weight, JoinedWeight) else (self.weight,)
        each = [len(part) // self.experts for part in parts]
        rows = [part[expert * some : (expert + 1) * some] for part, some in zip(parts, each, strict=True)]
        return Linear(stack(rows), None if self.bias is None else self.bias[expert])

    def of(self, expert: int, rows: torch.Tensor) -> Linear:
        """An expert's, with what is added for these rows of the step."""
        adapter = self.adapter
        return self[expert] if adapter is None else replace(self[expert], adapter=adapter.of_expert(expert, rows))


def joined(first: Linear, *others: Linear) -> Linear:
    """All outputs of one input, one after the other."""
    biases = [one.bias for one in (first, *others) if one.bias is not None]
    weight = stack([single for one in (first, *others) for single in _singles(one.weight)])
    adapters = [one.adapter for one in (first, *others) if one.adapter is not None]
    adapter = adapters[0].joined(adapters[1:]) if adapters else None
    return replace(first, weight=weight, bias=torch.cat(biases) if biases else None, adapter=adapter)


def summed(
    product: Callable[[torch.Tensor, Linear], torch.Tensor], x: torch.Tensor, linear: Linear, group: RankGroup
) -> torch.Tensor:
    """A product whose inputs may be split over ranks: each computes a part of every sum. The bias counts once."""
    if group.place.ranks == 1 or not linear.is_partial:
        return product(x, linear)
    out = group.all_reduce(product(x, replace(linear, bias=None)))
    return out if linear.bias is None else out + linear.bias


def _singles(weight: Weight) -> tuple[torch.Tensor | PackedWeight | StripWeight, ...]:
    return weight.parts if isinstance(weight, JoinedWeight) else (weight,)


def _output_first(
    weight: torch.Tensor | PackedWeight | StripWeight, spec: TensorSpec
) -> torch.Tensor | PackedWeight | StripWeight:
    """Every expert's outputs, one below another; packed weights are held so already."""
    if not isinstance(weight, torch.Tensor):
        return weight
    return (weight.transpose(1, 2) if spec.transposed else weight).flatten(0, 1)


class Parameters:
    """What the projections, norms and tensors of a description are on one rank.

    Tensors are taken out of `weights`, so that projections which are joined do not take their memory twice. Heads whose
    pairs of rotary dims lie otherwise are put into the one order that all lowerings rotate. `target`: where a drafter
    has no weight of its own, it shares its target's. `adapters`: what rows may add to projections.
    """

    def __init__(
        self, decoder: Decoder, weights: Weights, target: Parameters | None = None, adapters: Adapters | None = None
    ) -> None:
        self._target, self.adapters = target, adapters
        self._tensors = {name: weights.pop(name) for name in tensors_of(decoder) if target is None or name in weights}
        self._linears: dict[Projection, Linear] = {}
        self._experts: dict[ExpertProjection, ExpertLinear] = {}
        self._norms: dict[Norm, torch.Tensor] = {}
        # All at once: whoever allocates next has the room that joined parts leave.
        for projection in each(decoder, Projection):
            self.linear(projection)
        for of_experts in each(decoder, ExpertProjection):
            self.experts(of_experts)
        for attention in decoder.attentions:
            self._bind_attention(attention)
        for delta in each(decoder, GatedDeltaNet):
            self._bind_delta(delta)

    def linear(self, projection: Projection) -> Linear:
        if projection not in self._linears:
            if self._target is not None and projection.weights[0].name not in self._tensors:
                return self._target.linear(projection)
            weights = [self._tensors.pop(t.name) for t in projection.weights]
            biases = [self.tensor(t) for t in projection.biases]
            bias = torch.cat(biases) if biases else None
            adapter = self.adapters.of(projection) if self.adapters is not None else None
            self._linears[projection] = Linear(stack(weights), bias, projection.splits_inputs, adapter)
        return self._linears[projection]

    def take_linear(self, projection: Projection) -> Linear:
        """As `linear`, for the last time: whatever is made of it may take its memory."""
        found = self.linear(projection)
        del self._linears[projection]
        return found

    def experts(self, projection: ExpertProjection) -> ExpertLinear:
        if projection not in self._experts:
            experts = projection.weights[0].shape[0]
            parts = [_output_first(self._tensors.pop(t.name), t) for t in projection.weights]
            weight: Weight = stack_in_experts(parts, experts)
            biases = [self.tensor(t) for t in projection.biases]
            bias = torch.cat(biases, dim=1) if biases else None
            adapter = self.adapters.of(projection) if self.adapters is not None else None
            if projection.alternates:
                outputs = len(weight) // experts
                order = torch.arange(outputs, device=weight.device).view(-1, 2).t().flatten()
                weight = permute_outputs(weight, order)
                bias = None if bias is None else bias[:, order]
                adapter = None if adapter is None else adapter.with_outputs_permuted(order)
            self._experts[projection] = ExpertLinear(weight, experts, bias, adapter)
        return self._experts[projection]

    def take_experts(self, projection: ExpertProjection) -> ExpertLinear:
        """As `experts`, for the last time: whatever is made of it may take its memory."""
        found = self.experts(projection)
        del self._experts[projection]
        return found

    def convert_weights(self, convert: Callable[[Projection | ExpertProjection, Weight, int], Weight]) -> None:
        """Each projection's weight (of an expert, so many outputs) in another form; one at a time, as memory allows."""
        for projection, linear in self._linears.items():
            self._linears[projection] = replace(linear, weight=convert(projection, linear.weight, linear.outputs))
        for of_experts, each_one in self._experts.items():
            weight = convert(of_experts, each_one.weight, each_one.outputs)
            self._experts[of_experts] = replace(each_one, weight=weight)

    def norm(self, norm: Norm | None) -> torch.Tensor | None:
        """The weight in float32, as norms are computed; None where there is none."""
        if norm is None or norm.weight is None:
            return None
        if norm not in self._norms:
            weight = self.tensor(norm.weight).float()
            self._norms[norm] = weight + 1.0 if norm.adds_one else weight
        return self._norms[norm]

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        tensor = self._held(spec)
        assert isinstance(tensor, torch.Tensor), f"{spec.name} is quantized, and only projections may be"
        return tensor

    def table(self, spec: TensorSpec) -> torch.Tensor | StripWeight:
        """A matrix whose rows are looked up."""
        table = self._held(spec)
        return table if isinstance(table, StripWeight) else self.tensor(spec)

    def _held(self, spec: TensorSpec) -> torch.Tensor | PackedWeight | StripWeight:
        if self._target is not None and spec.name not in self._tensors:
            return self._target._held(spec)
        return self._tensors[spec.name]

    def head_norms(self, attention: Attention) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of queries and keys. Kernels multiply by a weight, so a norm without one gets ones."""
        found = []
        for norm in (attention.q_norm, attention.k_norm):
            weight = self.norm(norm)
            if norm is not None and weight is None:
                weight = torch.ones(attention.cache.key_dim, device=self.linear(attention.out).weight.device)
            found.append(weight)
        return found[0], found[1]

    def scores(self, attention: Attention) -> Scores:
        """How an attention weighs what it sees."""
        sinks = None if attention.sinks is None else self.tensor(attention.sinks).float()
        return Scores(attention.scale, attention.softcap, sinks)

    def qkv(self, attention: Attention) -> tuple[Linear, Linear | None]:
        """What makes queries, K and V, and what makes the gates of the heads, where they have some.

        Both are views of `linear`, whose last outputs are the gates.
        """
        linear = self.linear(attention.qkv)
        first = linear.outputs - attention.query_width
        return (linear[:first], linear[first:]) if attention.gated else (linear, None)

    def _bind_attention(self, attention: Attention) -> None:
        if attention.gated:
            self._put_gates_last(attention)
        order = attention.rope.dim_order() if attention.rope is not None else None
        if order is None:
            return
        linear = self.linear(attention.qkv)
        index = torch.tensor(order, device=linear.weight.device)
        rotated = attention.query_width + (attention.cache.kv_heads * len(order) if attention.owns_kv else 0)
        self._linears[attention.qkv] = linear.with_outputs_permuted(index, rotated)
        # A layer that shares KV has its owner's norm of keys.
        for norm in (attention.q_norm, attention.k_norm if attention.owns_kv else None):
            weight = self.norm(norm)
            if norm is not None and weight is not None:
                self._norms[norm] = weight.view(-1, len(order))[:, index].reshape(-1)

    def _put_gates_last(self, attention: Attention) -> None:
        """A checkpoint has them behind each head's query. All stay one tensor, so that one product makes them."""
        linear, width = self.linear(attention.qkv), attention.query_width
        heads = torch.arange(2 * width, device=linear.weight.device).view(attention.query_heads, 2, -1)
        both = linear[: 2 * width].with_outputs_permuted(heads.transpose(0, 1).flatten())
        self._linears[attention.qkv] = joined(both[:width], linear[2 * width :], both[width:])

    def _bind_delta(self, delta: GatedDeltaNet) -> None:
        """Outputs become q, k, v and z of all heads, and b and a of all, the value heads of a key head together."""
        if delta.order == BY_SECTION:
            return
        if delta.order == TILED:
            self._put_value_heads_together(delta)
            return
        linear, per_key = self.linear(delta.inputs), delta.value_heads // delta.key_heads
        values, device = per_key * delta.value_dim, linear.weight.device
        first = delta.key_heads * 2 * (delta.key_dim + values)
        qkvz, ba = linear[:first], linear[first:]
        if delta.order == BY_KEY_HEAD:
            widths = (delta.key_dim, delta.key_dim, values, values)
            qkvz = qkvz.with_outputs_permuted(_sections_first(delta.key_heads, widths, device))
        ba = ba.with_outputs_permuted(_sections_first(delta.key_heads, (per_key, per_key), device))
        self._linears[delta.inputs] = joined(qkvz, ba)

    def _put_value_heads_together(self, delta: GatedDeltaNet) -> None:
        """What adapters add is in this order already: theirs is that of other checkpoints."""
        linear, out = self.linear(delta.inputs), self.linear(delta.out)
        keys = 2 * delta.key_heads * delta.key_dim
        heads = torch.arange(delta.value_heads, device=linear.weight.device).view(-1, delta.key_heads).t().flatten()
        v = (heads[:, None] * delta.value_dim + torch.arange(delta.value_dim, device=heads.device)).flatten()
        qkv = torch.cat([torch.arange(keys, device=heads.device), keys + v])
        weights: list[torch.Tensor | PackedWeight | StripWeight] = []
        first = 0
        for order in (qkv, v, heads, heads):
            weights += _singles(permute_outputs(linear.weight[first : first + len(order)], order))
            first += len(order)
        self._linears[delta.inputs] = replace(linear, weight=stack(weights))
        self._linears[delta.out] = replace(out, weight=permute_inputs(out.weight, v))
        for tensor, order in ((delta.conv, qkv), (delta.a_log, heads), (delta.dt_bias, heads)):
            self._tensors[tensor.name] = self.tensor(tensor)[order]


def _sections_first(heads: int, widths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The order that takes rows of heads, each in sections of these widths, to sections of all heads."""
    rows = torch.arange(heads * sum(widths), device=device).view(heads, -1)
    return torch.cat([section.flatten() for section in torch.split(rows, list(widths), dim=1)])
