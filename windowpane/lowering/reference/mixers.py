"""Mixers in plain torch: one class for each kind of `models.blocks`, called with normed rows and the step's state.

A mixer that keeps something for later tokens also has `keep`, which does only that: where a step's logits are wanted of
a few rows, the last layers that keep anything call it for all rows and the mixer itself for those few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from windowpane.attention.mask import Mask
from windowpane.attention.reference import attend_decoding
from windowpane.lowering.group import RankGroup
from windowpane.lowering.linear import Linear, Parameters, summed
from windowpane.lowering.reference.context import Context, StepState
from windowpane.lowering.reference.ops import ACTIVATIONS, Angles, Ops
from windowpane.lowering.reference.routing import Routing, choose
from windowpane.lowering.reference.states import GatedDeltaMixer, Mamba2Mixer, ShortConvMixer
from windowpane.lowering.rope import rotate
from windowpane.models.blocks import (
    Attention,
    Block,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    Mamba2,
    Mixer,
    Norm,
    PerLayerInput,
    ShortConv,
    Sum,
    Temperature,
)
from windowpane.schedule.step import Segment


class AttentionMixer:
    """Attention over pages and the present, both through the KV format, so that chunking changes nothing."""

    def __init__(self, described: Attention, context: Context) -> None:
        parameters = context.parameters
        self.described, self._context, self._ops = described, context, context.ops
        self.qkv, self.gate = parameters.qkv(described)
        self.out = parameters.linear(described.out)
        self.q_norm, self.k_norm = parameters.head_norms(described)
        self.mask, self.scores = Mask.of(described.cache.retention), parameters.scores(described)

    def __call__(self, x: torch.Tensor, state: StepState) -> torch.Tensor:
        described, width = self.described, self.described.query_width
        if described.owns_kv and described.layer not in state.present:
            projected = self._ops.linear(x, self.qkv)
            queries = self._queries(projected[:, :width], state)
            state.present[described.layer] = self._store_form(projected[:, width:], state)
        else:
            queries = self._queries(self._ops.linear(x, self.qkv[:width]), state)
        attended = self._attend(queries, self._present(state, queries.dtype), state)
        if described.owns_kv and described.layer not in self._context.shared:
            write_present(self._ops, state, described.layer)
        if self.gate is not None:
            attended = attended * self._ops.linear(x, self.gate).sigmoid()
        return summed(self._ops.linear, attended, self.out, self._context.group)

    def keep(self, x: torch.Tensor, state: StepState) -> None:
        rest = self.qkv[self.described.query_width :]
        state.present[self.described.layer] = self._store_form(self._ops.linear(x, rest), state)

    def _present(self, state: StepState, dtype: torch.dtype) -> list[torch.Tensor]:
        """K and V of this step's rows. A drafter's rows are those that its target wrote last: they lie in pages."""
        layer = self.described.cache.layer
        if layer in state.present:
            return state.present[layer]
        if layer not in state.written:
            rows = state.pages.layers[layer].decoding_rows(state.step)
            state.written[layer] = [part.to(dtype) for part in rows]
        return state.written[layer]

    def _queries(self, projected: torch.Tensor, state: StepState) -> torch.Tensor:
        """Rotated queries [rows, heads, dim]."""
        rotated = self._rotated(projected, self.described.q_norm, self.q_norm, state)
        if self.described.temperature is not None:
            rotated = tempered(rotated, state.positions, self.described.temperature)
        return self._ops.asked_form(state.pages.layers[self.described.cache.layer], rotated)

    def _store_form(self, projected: torch.Tensor, state: StepState) -> list[torch.Tensor]:
        """What this step's tokens will be stored as: K and V, or one latent, each [tokens, heads, dim]."""
        described, cache = self.described, self.described.cache
        stored = state.pages.layers[cache.layer]
        if cache.latent:
            latent = self._ops.heads(self._heads(projected), None, described.v_norm, None)
            return [self._ops.through_format(stored, latent, 0)]
        width = cache.kv_heads * cache.key_dim
        keys = self._rotated(projected[:, :width], described.k_norm, self.k_norm, state)
        values = self._heads(projected[:, width:])
        if described.v_norm is not None:
            values = self._ops.heads(values, None, described.v_norm, None)
        return self._ops.stored_form(stored, keys, values)

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        dim = self.described.cache.key_dim
        return projected.reshape(len(projected), projected.shape[1] // dim, dim)

    def _rotated(
        self, projected: torch.Tensor, norm: Norm | None, weight: torch.Tensor | None, state: StepState
    ) -> torch.Tensor:
        """Heads of this step's rows (once narrowed, of those that still ask), normed and rotated by their positions."""
        if norm is not None and norm.across_heads:
            projected, norm = normed_across_heads(projected, weight, norm, self._context.group), None
        return self._ops.heads(self._heads(projected), weight, norm, self.angles(state))

    def angles(self, state: StepState) -> Angles | None:
        rope = self.described.rope
        if rope is None:
            return None
        if rope not in state.angles:
            state.angles[rope] = self._context.ropes.at(rope, state.positions)
        return state.angles[rope]

    # -- attending -------------------------------------------------------------------------------------------------

    def _attend(self, queries: torch.Tensor, present: list[torch.Tensor], state: StepState) -> torch.Tensor:
        outputs = []
        if decoding := state.step.num_decoding:
            outputs.append(self._attend_decoding(queries[:decoding], [x[:decoding] for x in present], state))
        for segment in state.segments:
            if segment.q_count:
                outputs.append(self._attend_segment(queries[segment.query_rows], segment, present, state))
        if not outputs:
            return queries.flatten(1)
        attended = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self._ops.attended_form(state.pages.layers[self.described.cache.layer], attended).flatten(1)

    def _attend_segment(
        self, queries: torch.Tensor, segment: Segment, present: list[torch.Tensor], state: StepState
    ) -> torch.Tensor:
        past_from = self.mask.first_visible(segment.start)
        parts = [x[segment.rows].transpose(0, 1) for x in present]
        if past_from < segment.start:
            stored = state.pages.layers[self.described.cache.layer]
            parts = self._ops.behind_past(stored, segment.slot, past_from, segment.start, parts)
        positions = torch.arange(past_from, segment.stop, device=queries.device)
        keys, values = self._keys_and_values(parts, positions)
        asking = positions[len(positions) - segment.q_count :]
        return self._ops.attend_chunk(queries, asking, keys, values, past_from, self.mask, self.scores)

    def _attend_decoding(self, queries: torch.Tensor, now: list[torch.Tensor], state: StepState) -> torch.Tensor:
        step, stored = state.step, state.pages.layers[self.described.cache.layer]
        if not self.described.cache.latent:
            keys, values = now
            return self._ops.attend_decoding(stored, step, queries, keys, values, self.mask, self.scores)
        past, positions, counts = stored.decoding_past(step, self.mask)
        past_keys, past_values = self._keys_and_values([x.to(queries.dtype) for x in past], positions)
        own = state.positions[: step.num_decoding, None]
        keys, values = self._keys_and_values([x[:, :, None] for x in now], own)
        return attend_decoding(queries, past_keys, past_values, counts, keys[:, :, 0], values[:, :, 0], self.scores)

    def _keys_and_values(self, parts: list[torch.Tensor], positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[…, heads, tokens, dim] each, from what is stored; K of a latent is rebuilt for […, tokens] positions."""
        if not self.described.cache.latent:
            return parts[0], parts[1]
        latent, rope = parts[0], self.described.rope
        assert self.k_norm is not None and rope is not None  # a latent is what remains of K before its norm's weight
        cos, sin = self._context.ropes.at(rope, positions)
        keys = rotate(latent.float() * self.k_norm, cos[..., None, :, :], sin[..., None, :, :])
        return keys.to(latent.dtype), latent


class MlpMixer:
    def __init__(self, described: GatedMLP, context: Context) -> None:
        self.described, self._context = described, context
        self.gate_up = context.parameters.linear(described.gate_up)
        self.down = context.parameters.linear(described.down)
        self.out_gate = None if described.out_gate is None else context.parameters.linear(described.out_gate)

    def __call__(self, x: torch.Tensor, state: StepState) -> torch.Tensor:
        def product(x: torch.Tensor, down: Linear) -> torch.Tensor:
            return self._context.ops.any_mlp(x, self.gate_up, down, self.described)

        out = summed(product, x, self.down, self._context.group)
        return out if self.out_gate is None else out * self._context.ops.linear(x, self.out_gate).sigmoid()


class ExpertsMixer:
    """Experts one after another, each for the rows that chose it: the order in which a row's results are added is that
    of the experts, whoever its batch mates are. Of several ranks, each has some of the experts.
    """

    def __init__(self, described: Experts, context: Context) -> None:
        parameters, router = context.parameters, described.router
        self.described, self._context, self._ops = described, context, context.ops
        self.norm, self.router_norm = parameters.norm(described.norm), parameters.norm(router.norm)
        tensors = (router.weight, router.bias, router.correction, router.expert_scales)
        self.router, self.bias, self.correction, self.scales = (
            None if spec is None else parameters.tensor(spec).float() for spec in tensors
        )
        self.gate_up, self.down = parameters.experts(described.gate_up), parameters.experts(described.down)
        self.first = context.group.place.rank * self.gate_up.experts

    def __call__(self, x: torch.Tensor, state: StepState) -> torch.Tensor:
        described, routing = self.described, self.route(x, state)
        if described.norm is not None:
            x = self._ops.norm(x, self.norm, described.norm)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, pairs in self._visited(routing):
            rows, shares = pairs // routing.ids.shape[1], routing.shares.view(-1, 1)[pairs]
            inputs = x[rows]
            if described.weighs_inputs:
                inputs, shares = (inputs * shares).to(x.dtype), torch.ones_like(shares)
            gate_up, down = (linear.of(expert, rows) for linear in (self.gate_up, self.down))
            made = self._ops.expert(inputs, gate_up, down, described)
            out.index_add_(0, rows, made.float() * shares)
        return self._context.group.all_reduce(out).to(x.dtype)

    def keep(self, x: torch.Tensor, state: StepState) -> None:
        """Where all that is asked of most rows is which experts they visit."""
        routing, wanted = self.route(x, state), state.wanted
        state.routed[self.described.layer] = Routing(routing.ids[wanted], routing.shares[wanted])

    def _visited(self, routing: Routing) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's experts that anybody chose, and the places in `routing` where."""
        ids = routing.ids.flatten()
        order = ids.argsort(stable=True)
        visited, counts = torch.unique_consecutive(ids[order], return_counts=True)
        for expert, pairs in zip((visited - self.first).tolist(), torch.split(order, counts.tolist()), strict=True):
            if 0 <= expert < self.gate_up.experts:
                yield expert, pairs

    def route(self, x: torch.Tensor, state: StepState) -> Routing:
        """The experts of each row; of wanted rows, once the others are gone, those that they were sent to before."""
        kept = state.routed.pop(self.described.layer, None)
        if kept is not None:
            return kept
        router = self.described.router
        if router.norm is not None:
            x = self._ops.norm(x, self.router_norm, router.norm)
        assert self.router is not None
        logits = self._ops.linear(x.float(), Linear(self.router)) * router.logit_multiplier
        routing = choose(router, logits if self.bias is None else logits + self.bias, self.correction, self.scales)
        routes = state.pages.routes
        if routes is not None and self.described.layer in routes.cache.layers:  # those of a drafter are not kept
            routes.write(state.step, self.described.layer, routing.ids)
        return routing


class PerLayerMixer:
    def __init__(self, described: PerLayerInput, context: Context) -> None:
        self.described, self._ops = described, context.ops
        self.gate = context.parameters.linear(described.gate)
        self.projection = context.parameters.linear(described.projection)

    def __call__(self, x: torch.Tensor, state: StepState) -> torch.Tensor:
        assert state.per_layer is not None
        gate = ACTIVATIONS[self.described.activation](self._ops.linear(x, self.gate))
        return self._ops.linear(gate * state.per_layer[:, self.described.layer], self.projection)


class SumMixer:
    def __init__(self, branches: list[Branch]) -> None:
        self._branches = branches

    def __call__(self, x: torch.Tensor, state: StepState) -> torch.Tensor:
        first, *others = (branch(x, state) for branch in self._branches)
        return sum(others, start=first)

    def keep(self, x: torch.Tensor, state: StepState) -> None:
        for branch in self._branches:
            branch.keep(x, state)


class Branch:
    """norm → mixer → norm: a block without its residual."""

    def __init__(self, described: Block, mixer: Any, parameters: Parameters, ops: Ops) -> None:
        self.described, self.mixer, self._ops = described, mixer, ops
        self.before, self.after = parameters.norm(described.before), parameters.norm(described.after)

    def __call__(self, x: torch.Tensor, state: StepState) -> torch.Tensor:
        mixed: torch.Tensor = self.mixer(self.normed(x), state)
        after, multiplier = self.described.after, self.described.multiplier
        mixed = mixed if after is None else self._ops.norm(mixed, self.after, after)
        return mixed if multiplier == 1.0 else mixed * multiplier

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        before = self.described.before
        return x if before is None else self._ops.norm(x, self.before, before)

    def keep(self, x: torch.Tensor, state: StepState) -> None:
        if hasattr(self.mixer, "keep"):
            self.mixer.keep(self.normed(x), state)


MIXERS = {
    Attention: AttentionMixer,
    GatedDeltaNet: GatedDeltaMixer,
    Mamba2: Mamba2Mixer,
    ShortConv: ShortConvMixer,
    GatedMLP: MlpMixer,
    Experts: ExpertsMixer,
    PerLayerInput: PerLayerMixer,
}


def make_mixer(described: Mixer, context: Any, kinds: Mapping[type, Any] = MIXERS) -> Any:
    """A mixer of a lowering that has these kinds; branches of a sum run one after another unless it has its own."""
    if isinstance(described, Sum) and Sum not in kinds:
        own = context.parameters, context.ops
        return SumMixer([Branch(block, make_mixer(block.mixer, context, kinds), *own) for block in described.branches])
    return kinds[type(described)](described, context)


def tempered(queries: torch.Tensor, positions: torch.Tensor, temperature: Temperature) -> torch.Tensor:
    """[rows, heads, dim], each row by the factor of its position."""
    factors = torch.log1p(((positions.float() + 1.0) / temperature.positions).floor()) * temperature.slope + 1.0
    return (queries.float() * factors[:, None, None]).to(queries.dtype)


def normed_across_heads(x: torch.Tensor, weight: torch.Tensor | None, norm: Norm, group: RankGroup) -> torch.Tensor:
    """RMS norm over all heads of a row. Ranks hold equal parts of it, so the mean of their means is the row's."""
    wide = x.float()
    means = group.all_reduce(wide.square().mean(-1, keepdim=True)) / group.place.ranks
    normed = wide * torch.rsqrt(means + norm.eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def write_present(ops: Ops, state: StepState, layer: int) -> None:
    """Store what the future can see of each token; nobody reads it as the present any more."""
    step, rows, stored = state.step, state.present.pop(layer), state.pages.layers[layer]
    if not state.keeps:
        return
    store = partial(ops.store, stored)
    if step.segments:
        stored.write(step, rows, store)
    else:
        ops.write_decoding(stored, step, rows)
