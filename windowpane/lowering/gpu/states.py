"""Mixers with a recurrent state in Triton: `lowering.reference.states`, whose states kernels read and write in pages.

Between its two projections each is what `ADVANCES` has for it. Rows that decode, in steps with drafts several of a
sequence, and rows of chunks take launches of their own. `keep` goes through all of it, so that only the output
projection is left for the wanted rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from windowpane.device.pages import StatePages
from windowpane.kv.caches import RECURRENT
from windowpane.lowering.gpu.kernels.causal_convolution import short_convolution
from windowpane.lowering.gpu.kernels.delta import decode_delta
from windowpane.lowering.gpu.kernels.delta_chunks import chunk_delta
from windowpane.lowering.gpu.kernels.mamba2 import Mamba2Layer, chunk_mamba2, decode_mamba2
from windowpane.lowering.gpu.kernels.state_places import StatePart, StatePlaces
from windowpane.lowering.gpu.mixers import GpuContext, GpuStepState
from windowpane.lowering.gpu.products import product
from windowpane.lowering.gpu.step import DeviceStep
from windowpane.lowering.linear import summed
from windowpane.models.blocks import GatedDeltaNet, Mamba2, ShortConv, StateMixer


class GpuStateMixer:
    def __init__(self, described: StateMixer, context: GpuContext) -> None:
        self.described, self._group = described, context.group
        self.inputs, self.out = (context.parameters.linear(p) for p in (described.inputs, described.out))
        self._product = partial(product, pdl=context.pdl)
        stored = context.pages.states[described.layer]
        self._state_group, self._stripe = stored.group, stored.stripe
        # A state in one slot is overwritten: its tails are copied first, and kernels begin when that is done.
        self._tails = _tails_of(stored) if stored.cache.slots == 1 else None
        parts, pdl = _parts_of(context, described.layer), context.pdl and self._tails is None
        self._advance = ADVANCES[type(described)](described, parts, context, pdl=pdl)

    def __call__(self, x: torch.Tensor, state: GpuStepState) -> torch.Tensor:
        mixed = state.mixed.pop(self.described.layer, None)
        return summed(self._product, self._mix(x, state) if mixed is None else mixed, self.out, self._group)

    def keep(self, x: torch.Tensor, state: GpuStepState) -> None:
        state.mixed[self.described.layer] = self._mix(x, state)[state.step.wanted]

    def _mix(self, x: torch.Tensor, state: GpuStepState) -> torch.Tensor:
        """What the output projection takes of all rows; the states behind them are stored."""
        before, after = (pages[self._stripe] for pages in state.state_pages[self._state_group])
        aside = None if self._tails is None else self._tails.index_select(0, before)
        places = StatePlaces(before, after, state.step.sequences.starts, aside)
        of_group = state.step.snapshots.get(self._state_group)
        snapshots = None if of_group is None else of_group[self._stripe]
        out = x.new_empty(len(x), self.out.inputs)
        self._advance(self._product(x, self.inputs), places, state.step, out, snapshots)
        return out


def _parts_of(context: GpuContext, layer: int) -> list[StatePart]:
    return [
        StatePart(context.pages.arena.view(part.dtype), int(part.storage_offset()), part.stride(0), *part.shape[1:])
        for part in context.pages.states[layer].parts
    ]


def _tails_of(stored: StatePages) -> torch.Tensor:
    """[page offset, elements]: a page as far as its tails go, which lie before what recurs."""
    named = zip(stored.parts, stored.cache.parts, strict=True)
    *_, last = (part for part, described in named if described.name != RECURRENT)
    return last.as_strided((len(last), last.storage_offset() + last[0].numel()), (last.stride(0), 1), storage_offset=0)


def _ahead(places: StatePlaces, step: DeviceStep) -> StatePlaces:
    """Those of sequences that decode: all of them in a step where some have several rows."""
    return places if step.segments is not None else places.among(slice(step.num_decoding))


def _behind(places: StatePlaces, decoding: int) -> StatePlaces:
    """Those of segments."""
    return places.among(slice(decoding, None))


def _longest(step: DeviceStep) -> int:
    """Tokens of the longest segment; 0 where there is none."""
    return 0 if step.chunks is None else max((s.stop - s.start for s in step.chunks.host_segments), default=0)


class _AdvanceMamba2:
    def __init__(self, described: Mamba2, parts: list[StatePart], context: GpuContext, *, pdl: bool) -> None:
        parameters, (x_tail, bc_tail, matrix) = context.parameters, parts
        bias, norm = described.conv_bias, described.norm
        self._ranks, self._pdl, self._norm = context.group, pdl, parameters.norm(norm)
        # Ranks hold equal parts of what is normed together, unless each has groups of its own.
        self._norms_over_ranks = norm is not None and context.group.place.ranks > 1 and not described.norms_groups
        self._layer = Mamba2Layer(
            described, (x_tail, bc_tail), matrix,
            conv=parameters.tensor(described.conv).float().squeeze(1).contiguous(),
            conv_bias=None if bias is None else parameters.tensor(bias).float(),
            rates=parameters.tensor(described.a_log).float().exp(),
            dt_bias=parameters.tensor(described.dt_bias).float(), skip=parameters.tensor(described.skip).float(),
            norm=None if self._norms_over_ranks else self._norm,
        )  # fmt: skip

    def __call__(
        self, made: torch.Tensor, places: StatePlaces, step: DeviceStep, out: torch.Tensor,
        snapshots: torch.Tensor | None,
    ) -> None:  # fmt: skip
        rows, layer, longest = step.num_decoding, self._layer, _longest(step)
        if rows:
            decode_mamba2(made[:rows], _ahead(places, step), layer, out[:rows], step.segments, pdl=self._pdl)
        if longest:
            assert step.chunks is not None
            segments = step.chunks.segments
            chunk_mamba2(made, _behind(places, rows), segments, longest, rows, layer, out, snapshots, pdl=self._pdl)
        if self._norms_over_ranks:
            self._norm_over_ranks(made, out)

    def _norm_over_ranks(self, made: torch.Tensor, out: torch.Tensor) -> None:
        described, inner = self._layer.described, self._layer.inner
        assert described.norm is not None
        y = out.float()
        means = self._ranks.all_reduce(y.square().mean(-1, keepdim=True)) / self._ranks.place.ranks
        y = y * torch.rsqrt(means + described.norm.eps)
        y = y if self._norm is None else y * self._norm
        if described.norms_first:
            gates = (made[:, :inner].float() * self._layer.multipliers[0]).to(made.dtype)
            y = y * torch.nn.functional.silu(gates.float())
        out.copy_(y)


class _AdvanceShortConv:
    def __init__(self, described: ShortConv, parts: list[StatePart], context: GpuContext, *, pdl: bool) -> None:
        parameters, bias = context.parameters, described.conv_bias
        self._pdl, (self._tail,) = pdl, parts
        self._conv = parameters.tensor(described.conv).float().squeeze(1).contiguous()
        self._bias = None if bias is None else parameters.tensor(bias).float()

    def __call__(
        self, made: torch.Tensor, places: StatePlaces, step: DeviceStep, out: torch.Tensor,
        snapshots: torch.Tensor | None,
    ) -> None:  # fmt: skip
        decoding, segments, longest = step.num_decoding, None, max(_longest(step), 1)
        if step.segments is not None:
            decoding, segments, longest = 0, step.segments, step.most_rows
        elif step.chunks is not None:
            segments = step.chunks.segments
        short_convolution(
            made, places, decoding, segments, longest, self._tail, self._conv, self._bias, out, snapshots, pdl=self._pdl
        )


class _AdvanceDelta:
    def __init__(self, described: GatedDeltaNet, parts: list[StatePart], context: GpuContext, *, pdl: bool) -> None:
        parameters, (*tails, matrix) = context.parameters, parts
        self._context = context
        self._options: dict[str, Any] = {
            "key_heads": described.key_heads, "eps": described.norm.eps, "pdl": pdl
        }  # fmt: skip
        conv = parameters.tensor(described.conv).float().squeeze(1).contiguous()
        decay, dt_bias = parameters.tensor(described.a_log).float().exp(), parameters.tensor(described.dt_bias).float()
        self._weights = (tails, matrix, conv, decay, dt_bias, parameters.norm(described.norm))

    def __call__(
        self, made: torch.Tensor, places: StatePlaces, step: DeviceStep, out: torch.Tensor,
        snapshots: torch.Tensor | None,
    ) -> None:  # fmt: skip
        rows, weights = step.num_decoding, self._weights
        if rows:
            ahead = _ahead(places, step)
            decode_delta(made[:rows], ahead, *weights, out[:rows], segments=step.segments, **self._options)
        if step.chunks is not None:
            chunk_delta(
                made, places, step.chunks, *weights, out, self._context.delta_workspace, snapshots=snapshots,
                **self._options,
            )  # fmt: skip


ADVANCES: dict[type, Any] = {GatedDeltaNet: _AdvanceDelta, Mamba2: _AdvanceMamba2, ShortConv: _AdvanceShortConv}
STATE_MIXERS = dict.fromkeys(ADVANCES, GpuStateMixer)
