"""Mixers in Triton: the arithmetic of `lowering.reference.mixers` in far fewer launches and over device tables.

Decoding steps keep a fixed shape, so that they can be captured as graphs: whatever varies (positions, slots, tables) is
read from device tensors. Three things differ from the reference, none of them visible in results:

- Rotary dims of latent layers are made adjacent, in the projections, norms and the output's columns alike, so that a
  kernel can rotate them as blocks.
- Steps that only decode store K and V while making them. The row written is one that no query of the step can see: a
  sequence's own next row, or one that its window or chunk has let go of.
- Where a KV format has a basis of its own, values are transformed into it and out of it by the weights on either side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from windowpane.attention.chunk_attention import make_chunk_attention
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.mask import Mask
from windowpane.attention.segments import ChunkQueries
from windowpane.attention.triton.decode import DecodeScratch, decode, decode_programs, decode_rows, rows_programs
from windowpane.attention.triton.view import LayerView, PagedLayer
from windowpane.attention.triton.write import CodedRows, write
from windowpane.device.pages import KVPages
from windowpane.device.tables import DeviceTables
from windowpane.lowering.adapters import Adapters
from windowpane.lowering.gpu.adapters import DeviceRows, run_adapted_experts
from windowpane.lowering.gpu.kernels.experts import run_experts
from windowpane.lowering.gpu.kernels.experts_hopper import has_large_scales
from windowpane.lowering.gpu.kernels.gated import gated, times_row_gate, times_sigmoid
from windowpane.lowering.gpu.kernels.heads import PageWrite, prepare_heads
from windowpane.lowering.gpu.kernels.norms import rms_norm
from windowpane.lowering.gpu.kernels.routing import RouteWrite, route
from windowpane.lowering.gpu.products import gated_product, product, ungated_product
from windowpane.lowering.gpu.step import DeviceStep
from windowpane.lowering.group import RankGroup
from windowpane.lowering.linear import Parameters, joined, summed
from windowpane.lowering.reference.mixers import normed_across_heads, tempered
from windowpane.lowering.reference.ops import Angles, Ops
from windowpane.lowering.reference.routing import Routing
from windowpane.lowering.rope import cos_and_sin, frequencies
from windowpane.models.blocks import RMS, Attention, Experts, GatedMLP, Norm, PerLayerInput
from windowpane.models.rope import Rope

LEAST_PAIRS = 16  # the narrowest block of a tensor-core product


@dataclass(frozen=True, slots=True)
class Present:
    """K and V of this step's rows (a latent's V is the latent), and their codes where pages are coded."""

    k: torch.Tensor
    v: torch.Tensor
    coded: CodedRows | None


@dataclass(slots=True)
class GpuStepState:
    """One step on its way through the layers; `present` has K and V of its rows until they are written.

    `projected`: the next layer's queries, keys and values, where the layer before it has made them already.
    `state_pages`: page offsets of states before and after, by group (`DeviceTables.state_pages`); `mixed`: what a
    mixer with a recurrent state has of the wanted rows, from the time that it is kept until the rows go on.
    `route_places`: where its rows store the experts they visit, None where nobody asks. `routed`: those of the wanted
    rows, from the time that all are stored until the rows go on. `adapters` are the model's, with this step's rows.
    """

    step: DeviceStep
    positions: torch.Tensor
    chunks: ChunkQueries | None
    cum_tiles: dict[Mask, torch.Tensor]
    per_layer: torch.Tensor | None
    narrowed: bool = False
    present: dict[int, Present] = field(default_factory=dict)
    projected: torch.Tensor | None = None
    state_pages: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    mixed: dict[int, torch.Tensor] = field(default_factory=dict)
    route_places: torch.Tensor | None = None
    routed: Routing | None = None
    adapters: Adapters | None = None

    def narrow(self) -> None:
        """From here on only the wanted rows go on."""
        self.narrowed, wanted = True, self.step.wanted
        self.positions, self.chunks = self.step.positions[wanted], self.step.wanted_chunks
        self.per_layer = None if self.per_layer is None else self.per_layer[wanted]
        if self.adapters is not None and wanted is not None:
            self.adapters.narrow(wanted)


class GpuOps(Ops):
    """Norms in one launch each."""

    def __init__(self, pdl: bool) -> None:
        self._pdl = pdl

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        if norm.kind != RMS or weight is None:
            return super().norm(x, weight, norm)
        normed = torch.empty_like(x)
        rms_norm(x, weight, norm.eps, normed, pdl=self._pdl)
        return normed


class GpuContext:
    """What all mixers of a model share: parameters, pages and tables, and scratch, since layers run in turn."""

    def __init__(
        self, parameters: Parameters, pages: KVPages, tables: DeviceTables, group: RankGroup, shared: frozenset[int],
        max_model_len: int, max_rows: int, dtype: torch.dtype, pdl: bool,
    ) -> None:  # fmt: skip
        self.parameters, self.pages, self.tables, self.group, self.shared = parameters, pages, tables, group, shared
        self.dtype, self.pdl, self.ops = dtype, pdl, GpuOps(pdl)
        self.prefill_scratch: PrefillScratch | None = None
        self.decoded = torch.empty(0, dtype=torch.uint8, device=pages.device)
        self.delta_workspace = torch.empty(0, dtype=torch.uint8, device=pages.device)
        self._max_model_len, self._max_rows = max_model_len, max_rows
        self.attentions: dict[int, GpuAttention] = {}  # by layer
        self._angles: dict[Rope, Angles] = {}
        self._scratches: dict[tuple[int, ...], DecodeScratch] = {}

    def view(self, layer: int) -> LayerView:
        stored = self.pages.layers[layer]
        group = self.pages.layout.groups[stored.group]
        piece = next(s for s in group.slices if s.cache.layer == layer)
        return LayerView.of(group, piece, self.pages.columns[stored.group], stored.layer_scales)

    def angles(self, rope: Rope | None) -> Angles | None:
        """cos and sin [positions, pairs], made in float64: kernels rotate in two steps, which only adds up for exact
        angles.
        """
        if rope is not None and rope not in self._angles:
            device = self.pages.device
            found = frequencies(rope, self._max_model_len)
            found = found[: rotary_pairs(found, rope.head_dim)].to(device, torch.float64)
            angles = torch.arange(self._max_model_len, dtype=torch.float64, device=device)[:, None] * found
            self._angles[rope] = cos_and_sin(rope, angles)
        return None if rope is None else self._angles[rope]

    def decode_scratch(self, described: Attention, view: LayerView) -> DecodeScratch:
        group = described.query_heads // view.kv_heads
        shape = (view.kv_heads, group, view.dim, decode_programs(view, self.pages.device))
        if shape not in self._scratches:
            self._scratches[shape] = DecodeScratch(self._max_rows, *shape, device=self.pages.device)
        return self._scratches[shape]

    def rows_scratch(self, described: Attention, view: LayerView, most_rows: int) -> DecodeScratch:
        """For several rows of each sequence; the first step that has some makes it."""
        group = described.query_heads // view.kv_heads
        shape = (group * most_rows, view.dim, rows_programs(view, group, most_rows, self.pages.device))
        if shape not in self._scratches:
            self._scratches[shape] = DecodeScratch.of_rows(view, group, most_rows, self.pages.device)
        return self._scratches[shape]


class GpuAttention:
    """Attention over pages and the present, and where this layer's pages lie."""

    def __init__(self, described: Attention, context: GpuContext) -> None:
        self.described, self._context = described, context
        context.attentions[described.layer] = self
        cache, pages, dtype = described.cache, context.pages, context.dtype
        angles, stored = context.angles(described.rope), pages.layers[cache.layer]
        self._angles, self._pairs = angles, 0 if angles is None else angles[0].shape[1]
        self._product = partial(product, pdl=context.pdl)
        self.q_norm, self.k_norm = context.parameters.head_norms(described)
        # Behind q, k and v come the gates of the heads, where they have some.
        self.qkv, self.out = (context.parameters.take_linear(p) for p in (described.qkv, described.out))
        self._kv_end = self.qkv.outputs - (described.query_width if described.gated else 0)
        if cache.latent:
            self._make_rotary_dims_adjacent()
        self._transform_values = False
        self._transform_back: torch.Tensor | None = None
        if stored.basis is not None:
            self._fold_basis(stored.basis)
        self._balance = stored.balance
        self._distance = self._pairs if cache.latent else cache.key_dim // 2
        self.view = context.view(cache.layer)
        self._kv_dtype = dtype if self.view.code else stored.dtype
        self._group = stored.group
        self._scratch = context.decode_scratch(described, self.view)
        self._page_write = None
        if described.owns_kv:
            table = context.tables.writing[stored.group]
            self._page_write = PageWrite(pages.arena, table, self.view, stored.unseen_every)
        rope = None
        if cache.latent:
            assert angles is not None and self.k_norm is not None
            rope = (*angles, self.k_norm)
        mask, scores = Mask.of(cache.retention), context.parameters.scores(described)
        table = context.tables.reading[stored.group]
        self.paged = PagedLayer(pages.arena, self.view, table, described.query_heads, mask, scores, rope)
        self.chunk_attention = make_chunk_attention(self.paged, context.prefill_scratch, context.decoded, dtype)

    def __call__(self, x: torch.Tensor, state: GpuStepState) -> torch.Tensor:
        return summed(self._product, self.attend(x, state), self.out, self._context.group)

    def attend(self, x: torch.Tensor, state: GpuStepState) -> torch.Tensor:
        """What the output projection takes [rows, query width]."""
        described, layer = self.described, self.described.layer
        queries, gates = self._queries_and_gates(x, state)
        # A drafter's rows stand where its target's last ones lie in pages: there is no present beside those.
        present = state.present.get(described.cache.layer) or Present(queries, queries, None)
        attended = self._attend(queries, present, state)
        if gates is not None:
            times_sigmoid(attended, gates, pdl=self._context.pdl)
        if described.owns_kv and layer not in self._context.shared:
            self.write(state)
        return attended

    def _queries_and_gates(self, x: torch.Tensor, state: GpuStepState) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries, and gates of the heads where they have some. K and V of the present are made too, but not by a layer
        that shares KV, nor by one that was narrowed, which has made them before.
        """
        described = self.described
        if described.owns_kv and described.layer in state.present:
            queries, _ = self._heads(
                self._product(x, self.qkv[: described.query_width]), described.query_heads, state, queries_only=True
            )
            return queries, self._product(x, self.qkv[self._kv_end :]) if described.gated else None
        projected = self._projected(x, state)
        queries, present = self._heads(projected, described.query_heads, state, queries_only=not described.owns_kv)
        if described.owns_kv:
            state.present[described.layer] = present
        return queries, projected[:, self._kv_end :] if described.gated else None

    def keep(self, x: torch.Tensor, state: GpuStepState) -> None:
        projected = self._product(x, self.qkv[self.described.query_width : self._kv_end])
        _, state.present[self.described.layer] = self._heads(projected, 0, state)

    def write(self, state: GpuStepState) -> None:
        """Store what the future can see of this step's rows, unless that was done while they were made."""
        present, view = state.present.pop(self.described.layer), self.view
        if state.step.writes is None:
            return
        writes, arena = state.step.writes[self._group], self._context.pages.arena
        lists = writes.rows, writes.offsets[view.stripe], writes.within
        if present.coded is not None:
            coded = present.coded
            write(coded.k, coded.v, arena, view, *lists, scales=(coded.k_scales, coded.v_scales))
        else:
            write(present.v if view.latent else present.k, present.v, arena, view, *lists)

    def _projected(self, x: torch.Tensor, state: GpuStepState) -> torch.Tensor:
        found, state.projected = state.projected, None
        return self._product(x, self.qkv) if found is None else found

    def _heads(
        self, projected: torch.Tensor, query_heads: int, state: GpuStepState, *, queries_only: bool = False
    ) -> tuple[torch.Tensor, Present]:
        """Queries, and K and V of the present, normed and rotated."""
        cache, described, rows, step = self.described.cache, self.described, len(projected), state.step
        kv_heads = 0 if queries_only else cache.kv_heads
        q = projected.new_empty(rows, query_heads, cache.key_dim)
        k = projected.new_empty(rows, kv_heads, cache.key_dim, dtype=self._kv_dtype)
        v = torch.empty_like(k)
        writes_now = step.writes is None and not queries_only
        coded = None
        if self.view.code and not writes_now and not queries_only:
            coded = CodedRows.empty(rows, self.view, projected.device)
        q_norm, k_norm = self.q_norm, self.k_norm
        if described.q_norm is not None and described.q_norm.across_heads:
            self._norm_across_heads(projected, query_heads, kv_heads)
            q_norm = k_norm = None
        eps = next((n.eps for n in (described.q_norm, described.v_norm) if n is not None), 0.0)
        prepare_heads(
            projected, state.positions if queries_only else step.positions, q_norm, k_norm, q, k, v,
            v_norm=described.v_norm is not None, angles=self._angles, pair_distance=self._distance, eps=eps,
            latent=cache.latent, page_write=self._page_write if writes_now else None,
            slots=step.slots if writes_now else None, view=self.view if self.view.code else None, coded=coded,
            balance=self._balance, transform_values=self._transform_values, pdl=self._context.pdl,
        )  # fmt: skip
        if described.temperature is not None:
            q = tempered(q, state.positions if queries_only else step.positions, described.temperature)
        return q, Present(k, v, coded)

    def _norm_across_heads(self, projected: torch.Tensor, query_heads: int, kv_heads: int) -> None:
        """In place, before heads are taken apart."""
        dim, described = self.described.cache.key_dim, self.described
        queries = 0, query_heads, described.q_norm, self.q_norm
        keys = query_heads, kv_heads, described.k_norm, self.k_norm
        for first, heads, norm, weight in (queries, keys):
            if heads and norm is not None:
                some = projected[:, first * dim : (first + heads) * dim]
                some.copy_(normed_across_heads(some, weight, norm, self._context.group))

    def _attend(self, queries: torch.Tensor, present: Present, state: GpuStepState) -> torch.Tensor:
        step, rows = state.step, state.step.num_decoding
        out = torch.empty_like(queries)
        if step.segments is not None:
            most_rows = step.most_rows
            decode_rows(
                queries, present.k, present.v, self.paged, step.segments, state.cum_tiles[self.paged.mask],
                self._context.rows_scratch(self.described, self.view, most_rows), out, rows=most_rows,
                pdl=self._context.pdl,
            )  # fmt: skip
        elif rows:
            decode(
                queries[:rows], present.k[:rows], present.v[:rows], self.paged, step.slots, step.positions[:rows],
                state.cum_tiles[self.paged.mask], self._scratch, out[:rows], pdl=self._context.pdl,
            )  # fmt: skip
        if state.chunks is not None:
            self.chunk_attention(queries, present.k, present.v, state.chunks, out)
        if self._transform_back is not None:
            out = out @ self._transform_back
        return out.flatten(1)

    # -- orders and bases ------------------------------------------------------------------------------------------

    def _make_rotary_dims_adjacent(self) -> None:
        """Dims [0, pairs) and their partners [D/2, D/2 + pairs) to the front, in all that touches a latent's dims."""
        dim, half, pairs = self.described.cache.key_dim, self.described.cache.key_dim // 2, self._pairs
        every = torch.arange(dim, device=self.qkv.weight.device)
        order = torch.cat([every[:pairs], every[half : half + pairs], every[pairs:half], every[half + pairs :]])
        self.qkv, self.out = self.qkv.with_outputs_permuted(order), self.out.with_inputs_permuted(order)
        assert self.q_norm is not None and self.k_norm is not None  # latents have normed queries and keys
        self.q_norm, self.k_norm = self.q_norm[order], self.k_norm[order]

    def _fold_basis(self, basis: torch.Tensor) -> None:
        """Make values in the pages' basis, and read what was attended in it, by the weights before and behind.

        Packed weights cannot be changed: then values are transformed where they are made, and results by a product, as
        they are where gates multiply them first.
        """
        if self.described.owns_kv:
            first = self.described.query_width + self.described.cache.kv_heads * len(basis)
            changed = self.qkv[: self._kv_end].with_outputs_in(basis, first)
            self._transform_values = changed is None
            if changed is not None:
                self.qkv = joined(changed, self.qkv[self._kv_end :]) if self.described.gated else changed
        out = None if self.described.gated else self.out.with_inputs_in(basis)
        self._transform_back, self.out = (basis.to(self._context.dtype), self.out) if out is None else (None, out)


class GpuMlp:
    def __init__(self, described: GatedMLP, context: GpuContext) -> None:
        self.described, self._context = described, context
        self.gate_up = context.parameters.linear(described.gate_up)
        self.down = context.parameters.linear(described.down)
        self.out_gate = None if described.out_gate is None else context.parameters.linear(described.out_gate)

    def __call__(self, x: torch.Tensor, state: GpuStepState) -> torch.Tensor:
        one = partial(product, pdl=self._context.pdl)
        described, pdl = self.described, self._context.pdl
        if described.has_gate:
            by = described.gate_multiplier
            inner = gated_product(x, self.gate_up, described.activation, multiplier=by, pdl=pdl)
        else:
            inner = ungated_product(x, self.gate_up, pdl=pdl)
        out = summed(one, inner, self.down, self._context.group)
        if self.out_gate is None:
            return out
        gate = self.out_gate.weight
        if not isinstance(gate, torch.Tensor) or self.out_gate.bias is not None or self.out_gate.adapter is not None:
            return out * one(x, self.out_gate).sigmoid()
        times_row_gate(out, x, gate, pdl=pdl)
        return out


class GpuExperts:
    """Of several ranks, each has some of the experts."""

    def __init__(self, described: Experts, context: GpuContext) -> None:
        self.described, self._context, parameters = described, context, context.parameters
        router = described.router
        self.norm, self.router_norm = parameters.norm(described.norm), parameters.norm(router.norm)
        self.router = parameters.tensor(router.weight)
        if router.logit_multiplier != 1.0:
            assert self.router_norm is not None  # it takes the factor
            self.router_norm = self.router_norm * router.logit_multiplier
        self.bias, self.correction, self.scales = (
            None if spec is None else parameters.tensor(spec).float()
            for spec in (router.bias, router.correction, router.expert_scales)
        )
        self.gate_up, self.down = parameters.experts(described.gate_up), parameters.experts(described.down)
        self._large_scales = has_large_scales(self.gate_up.weight, self.down.weight)
        self._first = context.group.place.rank * self.gate_up.experts
        self._routes = context.pages.routes

    @property
    def reads(self) -> list[tuple[Norm | None, torch.Tensor | None]]:
        """The norms of what the router and the experts read."""
        return [(self.described.router.norm, self.router_norm), (self.described.norm, self.norm)]

    def __call__(self, x: torch.Tensor, state: GpuStepState) -> torch.Tensor:
        ops = self._context.ops
        to_router, x = (x if norm is None else ops.norm(x, weight, norm) for norm, weight in self.reads)
        return self.mix(to_router, x, state)

    def keep(self, x: torch.Tensor, state: GpuStepState) -> None:
        """Where all that is asked of most rows is which experts they visit."""
        norm, weight = self.reads[0]
        routing = self._route(x if norm is None else self._context.ops.norm(x, weight, norm), state)
        state.routed = Routing(routing.ids[state.step.wanted], routing.shares[state.step.wanted])

    def _route(self, x: torch.Tensor, state: GpuStepState) -> Routing:
        router, places = self.described.router, state.route_places
        write = None
        if self._routes is not None and places is not None:
            write = RouteWrite(self._routes.arena, places, self._routes.place(self.described.layer) * router.chosen)
        return route(
            x, self.router, self.bias, self.correction, self.scales, chosen=router.chosen, scoring=router.scoring,
            renormalize=router.renormalizes, multiplier=router.multiplier, groups=router.groups,
            chosen_groups=router.chosen_groups, write=write, pdl=self._context.pdl,
        )  # fmt: skip

    def mix(self, to_router: torch.Tensor, x: torch.Tensor, state: GpuStepState) -> torch.Tensor:
        """From inputs that are normed."""
        described, context = self.described, self._context
        kept, state.routed = state.routed, None
        routing = kept or self._route(to_router, state)
        adapter = self.gate_up.adapter or self.down.adapter
        if adapter is not None and isinstance(rows := adapter.adapters.rows, DeviceRows):
            out = run_adapted_experts(x, routing, self.gate_up, self.down, described, self._first, rows)
            return context.group.all_reduce(out)
        out = run_experts(
            x, routing, self.gate_up.weight, self.down.weight, experts=self.gate_up.experts,
            activation=described.activation, gate_up_bias=self.gate_up.bias, down_bias=self.down.bias,
            limit=described.limit, alpha=described.alpha, weighs_inputs=described.weighs_inputs,
            first_expert=self._first, large_scales=self._large_scales, pdl=context.pdl,
        )  # fmt: skip
        return context.group.all_reduce(out)


class GpuPerLayer:
    def __init__(self, described: PerLayerInput, context: GpuContext) -> None:
        self.described, self._pdl = described, context.pdl
        self.gate = context.parameters.linear(described.gate)
        self.projection = context.parameters.linear(described.projection)

    def __call__(self, x: torch.Tensor, state: GpuStepState) -> torch.Tensor:
        assert state.per_layer is not None
        gate = product(x, self.gate, pdl=self._pdl)
        inner = torch.empty_like(gate)
        own = state.per_layer[:, self.described.layer]
        gated(gate, inner, self.described.activation, up=own, pdl=self._pdl)
        return product(inner, self.projection, pdl=self._pdl)


MIXERS = {Attention: GpuAttention, GatedMLP: GpuMlp, Experts: GpuExperts, PerLayerInput: GpuPerLayer}


def rotary_pairs(found: torch.Tensor, head_dim: int) -> int:
    """Pairs of dims that rotate, rounded up to what a kernel can block: the others have a frequency of 0."""
    rotating = int((found != 0).sum())
    return min(max(LEAST_PAIRS, 1 << (rotating - 1).bit_length()), head_dim // 2)
