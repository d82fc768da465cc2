"""The runner: turns a `Batch` into logits on one device. Two calls, so that sampling may wait for a grammar mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from windowpane.device import heap
from windowpane.device.pages import KVPages
from windowpane.device.transfer import to_device
from windowpane.kv.layout import Layout, rollback_for
from windowpane.kv.restore import HIDDEN_ROWS
from windowpane.lowering.adapters import Adapters
from windowpane.lowering.cpu.layers import JoinedLayers
from windowpane.lowering.cpu.model import lower
from windowpane.lowering.cpu.repacked import put_into_strips
from windowpane.lowering.group import ALONE, RankGroup
from windowpane.lowering.linear import Parameters, Weights
from windowpane.lowering.scales import Calibration, settle_scales
from windowpane.models.adapters import AdapterRoom
from windowpane.models.quantization import Quantization
from windowpane.models.running import runnable
from windowpane.models.spec import ModelSpec
from windowpane.runners.drafting import DraftingLayers
from windowpane.schedule.batch import Batch, wanted_rows
from windowpane.schedule.step import Step

LONG_PROMPT_TOKENS = 1024  # whose activations are worth giving back: computing them again takes far longer


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`logits`: one float32 row per decoding row, then per chunk that samples.

    `prompt_logits` gives any rows of a chunk, computed when asked for: all at once may be more than memory holds.
    `prompt_hidden` has the final hidden states that they are computed of. `too_far`: by how much each row of `logits`
    lies before the position that a batch which is ahead has for it.
    """

    logits: torch.Tensor
    prompt_logits: dict[int, Callable[[slice], torch.Tensor]]
    prompt_hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    too_far: torch.Tensor | None = None


class Runner:
    """One model, or one rank's part of it: its weights and its arena on one device. `spec` is the whole model's.

    `drafter_weights` are those of a model that drafts for it and has a checkpoint of its own. `adapter_room`: how many
    adapters there is room for, of which rank.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        layout: Layout,
        num_slabs: int,
        num_slots: int,
        max_model_len: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        draft_tokens: int = 0,
        host_slabs: int = 0,
        group: RankGroup = ALONE,
        calibration: Calibration | None = None,
        drafter_weights: Weights | None = None,
        adapter_room: AdapterRoom | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.weights_bytes = sum(t.nbytes for held in (weights, drafter_weights or {}) for t in held.values())
        spec = spec.on_rank(group.place.ranks)
        decoder = runnable(spec)
        self.adapters = Adapters(decoder, adapter_room, dtype, device) if adapter_room is not None else None
        parameters = Parameters(decoder, weights, adapters=self.adapters)
        if isinstance(spec.quantization, Quantization) and spec.quantization.rounds_inputs:
            put_into_strips(decoder, parameters)
        self.model = lower(decoder, parameters, max_model_len, group)
        rollback_tokens = rollback_for(draft_tokens, layout)
        self.pages = KVPages(layout, num_slabs, num_slots, max_model_len, device, rollback_tokens, host_slabs)
        drafting = None
        if spec.drafter is not None:
            described = spec.drafter.decoder
            own = Parameters(described, weights if drafter_weights is None else drafter_weights, parameters)
            drafting = lower(described, own, max_model_len, group, self.model)
        settle_scales(self.model, self.pages, calibration or Calibration(), drafting)
        self.drafter = None if drafting is None else DraftingLayers(drafting, self.pages)
        self._sampled = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._prompt_tokens = 0  # since freed memory was given back
        # Final hidden states of prompts' last tokens, by the rows that the scheduler hands out.
        self._hidden = HiddenStore(spec.hidden_size, dtype, device)

    @property
    def arena(self) -> torch.Tensor:
        return self.pages.arena

    @torch.inference_mode()
    def forward(self, batch: Batch, *, all_logits_slots: frozenset[int] = frozenset()) -> StepOutput:
        """Run one step. Chunks of `all_logits_slots` also give the logits of every one of their tokens."""
        if self.adapters is not None:
            self.adapters.before_step(batch.placed_adapters)
        self._give_back_activations(batch)
        step = Step.of_rows(batch) if self._takes_as_rows(batch) else Step.of(batch, all_logits_slots)
        self.pages.before_step(batch.changes)
        hidden = self._hidden.nothing
        if len(step.positions):
            sampled = self._sampled[torch.from_numpy(batch.decode_slots).to(self.device)]
            tokens = torch.cat([sampled, torch.from_numpy(step.tokens).to(self.device, torch.int64)])
            hidden = self._final_hidden(step, tokens)
        self.pages.after_step(batch.changes)
        if not batch.chunks and not len(step.positions):  # only copies between tiers were to be begun
            return StepOutput(hidden.float(), {})
        for chunk in batch.chunks:
            if self.drafter is not None and chunk.hidden is not None:
                self.drafter.know(chunk.slot, chunk.start - 1, self._hidden.row(chunk.hidden))
        hidden = self._hidden.exchange(hidden, batch, all_logits_slots)
        return split_rows(hidden, self.model.logits, batch, all_logits_slots)

    def _give_back_activations(self, batch: Batch) -> None:
        """When long prompts are done: the allocator would keep what they took for as long as the process runs."""
        self._prompt_tokens += batch.prompt_tokens
        if not batch.prompt_tokens and self._prompt_tokens >= LONG_PROMPT_TOKENS and self.device.type == "cpu":
            heap.give_back()
            self._prompt_tokens = 0

    def _final_hidden(self, step: Step, tokens: torch.Tensor) -> torch.Tensor:
        """Of the wanted rows; a drafter sees them too, or those of all rows."""
        if self.drafter is None:
            return self.model.final_hidden(step, tokens, self.pages)
        whole = step.whole() if self.drafter.needs_all_hidden else step
        hidden = self.model.final_hidden(whole, tokens, self.pages)
        self.drafter.observe_step(step, tokens, hidden)
        return hidden if whole is step else hidden[torch.from_numpy(step.wanted).to(self.device)]

    def _takes_as_rows(self, batch: Batch) -> bool:
        """Whether a step's drafts run as decoding rows, which compiled layers store before any of them attends."""
        return (
            verifies_only(batch)
            and not len(batch.adapters)
            and all(isinstance(layer, JoinedLayers) and layer.decodes_in(self.pages) for layer in self.model.layers)
        )

    def take_sampled(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Remember what each slot sampled last: its next decoding row computes that token."""
        self._sampled[slots] = tokens

    def landed(self) -> list[tuple[int, float]]:
        """Transfers between tiers that are over and were not named before, and the seconds that they took."""
        return self.pages.host.landed()

    def read_routes(self, slot: int, start: int, stop: int) -> Callable[[], NDArray[np.integer[Any]]]:
        """The experts that tokens [start, stop) of a slot visited: see `RoutePages.read`."""
        assert self.pages.routes is not None
        return self.pages.routes.read(slot, start, stop)


def verifies_only(batch: Batch) -> bool:
    """Whether a step's chunks are all drafts, and it replaces no page that it still reads: where K and V are stored
    before anything attends, drafts can then be decoding rows that find one another in pages.
    """
    return bool(batch.chunks) and not batch.changes.late and all(c.drafts is not None for c in batch.chunks)


class HiddenStore:
    """Final hidden states of prompts that restore points keep: the same prompt then needs the output layer alone."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = torch.zeros(HIDDEN_ROWS, width, dtype=dtype, device=device)

    @property
    def nothing(self) -> torch.Tensor:
        """Hidden states of no rows."""
        return self._rows[:0]

    def row(self, index: int) -> torch.Tensor:
        """One of them, [1, width]."""
        return self._rows[index : index + 1].clone()

    def exchange(self, hidden: torch.Tensor, batch: Batch, all_logits_slots: frozenset[int]) -> torch.Tensor:
        """Put kept hidden states in the place of chunks without tokens; then keep those that are to be kept.

        In this order: a row that is read in this step may be given to another prompt in the same step.
        """
        if not any(c.hidden is not None or c.keep_hidden is not None for c in batch.chunks):
            return hidden
        row = len(batch.decode_slots)
        pieces, kept = [hidden[:row]], []
        for chunk in batch.chunks:
            if chunk.hidden is not None:
                pieces.append(self.row(chunk.hidden))
                continue
            rows = wanted_rows(chunk, all_logits_slots)
            pieces.append(hidden[row : row + rows])
            row += rows
            if chunk.keep_hidden is not None:
                kept.append((chunk.keep_hidden, row - 1))
        for target, source in kept:
            self._rows[target] = hidden[source]
        return torch.cat(pieces)


def split_rows(
    hidden: torch.Tensor,
    logits: Callable[[torch.Tensor], torch.Tensor],
    batch: Batch,
    all_logits_slots: frozenset[int],
) -> StepOutput:
    """Pick the rows that sample out of all rows that were wanted, and turn them into logits."""
    if not all_logits_slots:
        return StepOutput(logits(hidden), {})
    row = len(batch.decode_slots)
    sampling = list(range(row))
    prompt_logits: dict[int, Callable[[slice], torch.Tensor]] = {}
    prompt_hidden: dict[int, torch.Tensor] = {}
    for chunk in batch.chunks:
        rows = wanted_rows(chunk, all_logits_slots)
        if chunk.slot in all_logits_slots:
            prompt_hidden[chunk.slot] = hidden[row : row + rows]
            prompt_logits[chunk.slot] = partial(_logits_of, logits, prompt_hidden[chunk.slot])
        row += rows
        if chunk.samples:
            sampling.append(row - 1)
    sampled = logits(hidden[to_device(sampling, hidden.device, torch.int64)])
    return StepOutput(sampled, prompt_logits, prompt_hidden)


@torch.inference_mode()
def _logits_of(logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, rows: slice) -> torch.Tensor:
    return logits(hidden[rows])
