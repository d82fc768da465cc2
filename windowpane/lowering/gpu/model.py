"""A description as Triton launches over device tables: a step whose shape is fixed can be captured."""

from __future__ import annotations

from functools import partial

import torch

from windowpane.attention.chunk_attention import heads_of, hopper_scratch
from windowpane.attention.mask import Mask
from windowpane.attention.segments import Tiling
from windowpane.attention.triton.decode import plan_decode, plan_rows
from windowpane.attention.triton.decode_several import MOST_ROWS, rows_at_once
from windowpane.attention.triton.widen import plain_view
from windowpane.device.pages import KVPages
from windowpane.device.tables import DeviceTables
from windowpane.kv.decoded_past import decoded_past_bytes
from windowpane.kv.delta_workspace import delta_workspace_bytes
from windowpane.lowering.gpu.chaining import ChainedLayer, chain_layers
from windowpane.lowering.gpu.kernels.logits import softcap
from windowpane.lowering.gpu.kernels.norms import rms_norm
from windowpane.lowering.gpu.kernels.route_places import RoutePlaces
from windowpane.lowering.gpu.layers import GpuLayer
from windowpane.lowering.gpu.mixers import GpuContext, GpuStepState
from windowpane.lowering.gpu.products import product
from windowpane.lowering.gpu.step import DeviceStep
from windowpane.lowering.group import ALONE, RankGroup, look_up
from windowpane.lowering.linear import Linear, Parameters
from windowpane.lowering.reference.model import CentroidHead, Joining, PerLayerValues
from windowpane.lowering.reference.ops import PLAIN
from windowpane.models.blocks import RMS, Decoder, GatedDeltaNet, each

# From this compute capability on, a kernel may load while the one before ends: weights, and what an earlier one made.
OVERLAPPING_LAUNCHES = (9, 0)


class GpuModel:
    """`max_rows` is the most sequences that decode in one step; `use_hopper` False keeps to the plain kernels.

    Attention's projections are taken out of `parameters`: those in another order do not take their memory twice. A
    drafter has the scratch of its `target`, and its embeddings where it joins them and hidden states.
    """

    def __init__(
        self, decoder: Decoder, parameters: Parameters, pages: KVPages, tables: DeviceTables, max_model_len: int,
        max_rows: int, group: RankGroup = ALONE, *, use_hopper: bool = True, use_chain: bool = True,
        target: GpuModel | None = None,
    ) -> None:  # fmt: skip
        self.decoder, self._group, self._target, self.adapters = decoder, group, target, parameters.adapters
        self.embedding = parameters.tensor(decoder.embedding)
        self.head = parameters.linear(decoder.head) if decoder.head else Linear(self.embedding)
        self._per_layer = PerLayerValues(decoder, parameters, group) if decoder.per_layer else None
        device, dtype = self.embedding.device, self.embedding.dtype
        # Rounded as the reference rounds it.
        self._embedding_multiplier = torch.tensor(decoder.embedding_multiplier, dtype=dtype).item()
        # Between ranks' collectives kernels wait for one another as usual.
        self.pdl = (
            device.type == "cuda"
            and group.place.ranks == 1
            and torch.cuda.get_device_capability(device) >= OVERLAPPING_LAUNCHES
        )
        self._product = partial(product, pdl=self.pdl)
        self._join = Joining(decoder.join, parameters, PLAIN) if decoder.join else None
        self._centroids = CentroidHead(decoder.centroids, parameters, PLAIN, group) if decoder.centroids else None
        context = GpuContext(
            parameters, pages, tables, group, decoder.shared_layers, max_model_len, max_rows, dtype, self.pdl
        )
        self.prefill_scratch_bytes = 0
        if target is not None:
            context.decoded = target.decoded
        else:
            self.prefill_scratch_bytes = self._make_prefill_scratch(context, max_model_len, use_hopper)
        self.decoded: torch.Tensor = context.decoded
        following = [layer.blocks[0].before for layer in decoder.layers[1:]] + [decoder.norm]
        layers = [
            GpuLayer(layer, context, norm, decoder.last_keeping_block if index == decoder.last_keeper else None)
            for index, (layer, norm) in enumerate(zip(decoder.layers, following, strict=True))
        ]
        self._route_places = None
        if decoder.routes is not None and pages.routes is not None:
            self._route_places = RoutePlaces(pages.routes, tables)
        self._attentions = context.attentions
        self.tables = tables
        self._state_groups = tuple(dict.fromkeys(pages.states[mixer.layer].group for mixer in decoder.state_mixers))
        self._masks = tuple(dict.fromkeys(m.paged.mask for m in self._attentions.values()))
        self.layers: list[GpuLayer | ChainedLayer] = list(layers)
        if use_hopper and use_chain and group.place.ranks == 1 and self.adapters is None:
            self.layers = chain_layers(layers, decoder.hidden_size, dtype, device, self.pdl)

    @property
    def tilings(self) -> frozenset[Tiling]:
        """How chunks are cut into query tiles."""
        return frozenset(attention.chunk_attention.tiling for attention in self._attentions.values())

    @property
    def rows_at_once(self) -> int:
        """Rows of one sequence that every layer attends in one pass over its pages."""
        return min((rows_at_once(a.paged.group, a.view.dim) for a in self._attentions.values()), default=MOST_ROWS)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = look_up(self.embedding, tokens, self._group)
        return hidden if self.decoder.embedding_multiplier == 1.0 else hidden * self._embedding_multiplier

    def final_hidden(self, step: DeviceStep, tokens: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        """The normed output of the last layer for the wanted rows; what `logits` takes.

        `before` has what a joining drafter takes beside each token: the hidden state of the token before it.
        """
        # Mixers look up plans, positions and pages of states before the launch ahead of them has ended. Whatever makes
        # those has a plain launch behind it, which waits for it.
        plans, sequences = self._plan(step), step.sequences
        state_pages = {
            group: self.tables.state_pages(group, sequences.slots, sequences.state_slots)
            for group in self._state_groups
        }
        places = self._route_places(step) if self._route_places is not None else None
        if self.adapters is not None:
            self.adapters.rows = step.adapters
        if self._join is None:
            hidden = self.embedded(tokens)
        else:
            assert self._target is not None and before is not None
            hidden = self._join(self._target.embedded(tokens), before)
        per_layer = self._per_layer(tokens, hidden, self._product) if self._per_layer else None
        state = GpuStepState(
            step, step.positions, step.chunks, plans, per_layer, state_pages=state_pages, route_places=places,
            adapters=self.adapters,
        )  # fmt: skip
        normed = self._first_norm(hidden)
        for layer in self.layers:
            if state.narrowed and not len(hidden):
                break  # a chunk in the middle of a prompt: nobody asks for more
            hidden, normed = layer(hidden, normed, state)
        for kept in list(state.present):
            self._attentions[kept].write(state)
        if self.adapters is not None:
            self.adapters.rows = None
        return normed

    def passed_on(self, normed: torch.Tensor) -> torch.Tensor:
        """Of a joining drafter: what it takes beside the next token, from its own final hidden states."""
        return normed if self._join is None else self._join.passed_on(normed)

    def logits(self, normed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """float32 logits of final hidden states, in `out` where it is given."""
        if self._centroids is not None:
            return self._centroids(normed, self.head)
        logits = self._group.all_gather(self._product(normed, self.head))
        if out is None:
            out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        if self.decoder.logit_multiplier != 1.0:
            logits = logits.float() * self.decoder.logit_multiplier
        softcap(logits, out, self.decoder.logit_softcap, pdl=self.pdl)
        return out

    def _first_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        first = self.layers[0].blocks[0]
        norm = first.described.before
        if norm is None or norm.kind != RMS:
            return hidden if norm is None else PLAIN.norm(hidden, first.before, norm)
        normed = torch.empty_like(hidden)
        rms_norm(hidden, first.before, norm.eps, normed, pdl=self.pdl)
        return normed

    def _plan(self, step: DeviceStep) -> dict[Mask, torch.Tensor]:
        """For each mask, how the past of the decoding rows is shared out."""
        rows = step.num_decoding
        if step.segments is not None:
            count = len(step.segments) + 1
            planned = {m: torch.empty(count, dtype=torch.int32, device=step.positions.device) for m in self._masks}
            for mask, cum_tiles in planned.items():
                plan_rows(step.segments, cum_tiles, mask)
            return planned
        planned = {m: torch.empty(rows + 1, dtype=torch.int32, device=step.positions.device) for m in self._masks}
        if rows:
            for mask, cum_tiles in planned.items():
                plan_decode(step.positions[:rows], cum_tiles, mask)
        return planned

    def _make_prefill_scratch(self, context: GpuContext, max_model_len: int, use_hopper: bool) -> int:
        """Scratch of chunks, for all layers together; returns its bytes."""
        pages, dtype = context.pages, context.dtype
        if use_hopper:
            views = [(a, context.view(a.cache.layer)) for a in self.decoder.attentions]
            rows = [
                (plain_view(v, dtype) if v.code else v, heads_of(v, a.query_heads, Mask.of(a.cache.retention)))
                for a, v in views
            ]
            context.prefill_scratch = hopper_scratch(rows, max_model_len, pages.device)
        decoded_bytes = decoded_past_bytes(pages.layout, str(dtype).removeprefix("torch."), max_model_len)
        context.decoded = torch.empty(decoded_bytes, dtype=torch.uint8, device=pages.device)
        delta_bytes = max(
            (delta_workspace_bytes(delta, dtype.itemsize) for delta in each(self.decoder.layers, GatedDeltaNet)),
            default=0,
        )
        context.delta_workspace = torch.empty(delta_bytes, dtype=torch.uint8, device=pages.device)
        return decoded_bytes + delta_bytes + (context.prefill_scratch.bytes if context.prefill_scratch else 0)
