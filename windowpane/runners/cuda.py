"""The runner on a GPU: kernels over device tables, decoding steps replayed as graphs, one transfer per step.

Nothing in a step waits for the device: inputs travel from pinned memory, sampled tokens stay where the next step
finds them. On a CPU it runs only in Triton's interpreter, which is how it is tested there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from windowpane.device.pages import KVPages
from windowpane.device.tables import DeviceTables
from windowpane.device.transfer import Transfer, to_device
from windowpane.kv.changes import NO_CHANGES, Changes, Snapshot
from windowpane.kv.layout import Layout, rollback_for
from windowpane.kv.retention import State
from windowpane.lowering.adapters import Adapters
from windowpane.lowering.gpu.adapters import AdapterTables
from windowpane.lowering.gpu.model import GpuModel
from windowpane.lowering.gpu.step import (
    DRAFT_INPUTS,
    MOST_SEGMENT_TOKENS,
    PLAIN_INPUTS,
    STATE_DRAFT_INPUTS,
    DeviceStep,
    StepBuilder,
    padding,
    row_segments,
    tokens_of,
)
from windowpane.lowering.gpu.stepped import SteppedGpuModel
from windowpane.lowering.group import ALONE, RankGroup
from windowpane.lowering.linear import Parameters, Weights
from windowpane.lowering.reference.model import ReferenceModel
from windowpane.lowering.scales import Calibration, settle_scales
from windowpane.models.adapters import AdapterRoom
from windowpane.models.running import runnable
from windowpane.models.spec import ModelSpec
from windowpane.runners.assistant import Assistant
from windowpane.runners.compiling import compiling_ahead
from windowpane.runners.device_drafts import has_places
from windowpane.runners.drafting import DraftingLayers
from windowpane.runners.graphs import DecodeGraphs, Progress, ladder
from windowpane.runners.multi_token import MultiTokenLayers, rows_of
from windowpane.runners.plain import HiddenStore, StepOutput, split_rows, verifies_only
from windowpane.schedule.batch import Batch, PromptChunk
from windowpane.schedule.step import Segment, Step

SMALL_CHUNK = 128
DRAFT_ROWS = 256  # that graphs are captured for where sequences are few; steps with more take drafts as chunks


class CudaRunner:
    """One model, or one rank's part of it: its weights, its arena and its graphs on one GPU.

    `use_graphs` False runs every step launch by launch; `use_hopper` False leaves chunks and single rows to the plain
    kernels on a Hopper GPU too, and `use_chain` False only the single rows of int4 layers.

    A step stores a decoding row's K and V before anything attends, so drafts are decoding rows of the same slot at the
    positions behind it, and are attended together with it in one pass over its pages; a recurrent state goes through
    them in turn. A step with prompts, or one that replaces a page which it still reads, takes drafts as chunks.
    `drafter_weights` are those of a drafter with a checkpoint of its own. The drafts of an assistant, or of
    layers for multi-token prediction, are one graph; other models draft launch by launch.
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
        use_graphs: bool = True,
        use_hopper: bool = True,
        use_chain: bool = True,
        group: RankGroup = ALONE,
        progress: Progress | None = None,
        calibration: Calibration | None = None,
        drafter_weights: Weights | None = None,
        adapter_room: AdapterRoom | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.weights_bytes = sum(t.nbytes for held in (weights, drafter_weights or {}) for t in held.values())
        spec = spec.on_rank(group.place.ranks)
        decoder = runnable(spec, on_gpu=True)
        self.adapters = Adapters(decoder, adapter_room, dtype, device) if adapter_room is not None else None
        parameters = Parameters(decoder, weights, adapters=self.adapters)
        drafting, own = spec.drafter.decoder if spec.drafter else None, None
        if drafting is not None:
            own = Parameters(drafting, weights if drafter_weights is None else drafter_weights, parameters)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # projections were joined: the arena needs the room that their parts leave
        rollback_tokens = rollback_for(draft_tokens, layout)
        self.pages = KVPages(layout, num_slabs, num_slots, max_model_len, device, rollback_tokens, host_slabs)
        plain, plain_drafter = ReferenceModel(decoder, parameters, max_model_len, group), None
        if drafting is not None and own is not None:
            plain_drafter = ReferenceModel(drafting, own, max_model_len, group, target=plain)
        settle_scales(plain, self.pages, calibration or Calibration(), plain_drafter)
        self.activation_bytes: int | None = None  # measured by `rehearse`
        self.tables = DeviceTables([entries.shape for entries in self.pages.reading], device)
        self._sampled = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._hidden = HiddenStore(spec.hidden_size, dtype, device)
        # Rows that decode in one step, drafts included.
        self._max_rows = max(num_slots, min(num_slots * (1 + draft_tokens), DRAFT_ROWS))
        self._max_model_len = max_model_len
        with torch.inference_mode():
            self.model = GpuModel(
                decoder, parameters, self.pages, self.tables, max_model_len, self._max_rows, group,
                use_hopper=use_hopper, use_chain=use_chain,
            )  # fmt: skip
            self._adapter_tables = None
            if adapter_room is not None:
                slots, rows = adapter_room.slots, self._max_rows
                self._adapter_tables = AdapterTables(slots, rows, device, pdl=self.model.pdl)
            self._builder = StepBuilder(self.pages, self.tables, self.model.tilings, self._adapter_tables)
            # What decoding rows are told, at a fixed place.
            kinds = (STATE_DRAFT_INPUTS if self.pages.states else DRAFT_INPUTS) if draft_tokens else PLAIN_INPUTS
            self._inputs = torch.zeros(kinds, self._max_rows, dtype=torch.int32, device=device)
            # Rows of one sequence that are attended together, and the segments that have them. Where there are states,
            # a segment has to have all of them.
            self._most_rows = min(1 + draft_tokens, self.model.rows_at_once)
            if self.pages.states and self._most_rows <= draft_tokens:
                self._most_rows = 1
            self._segments = torch.zeros(self._max_rows, len(Segment._fields), dtype=torch.int32, device=device)
            # Final hidden states of decoding rows, where a drafter begins with them.
            self._final = None
            if drafting is not None and drafting.join is not None:
                self._final = torch.empty(self._max_rows, spec.hidden_size, dtype=dtype, device=device)
            self.graphs: DecodeGraphs | None = None
            self.adapted_graphs: DecodeGraphs | None = None  # for steps whose rows have adapters
            self.drafter: Assistant | DraftingLayers | None = None
            in_graphs = use_graphs and device.type == "cuda" and group.in_graphs
            if in_graphs or drafting is not None:
                logits = torch.empty(self._max_rows, spec.vocab_size, dtype=torch.float32, device=device)
            if in_graphs:
                common = (
                    self.model, self._inputs, self._sampled, logits, ladder(self._max_rows), progress,
                    self._segments if self._most_rows > 1 else None, self._most_rows, self._final,
                )  # fmt: skip
                self.graphs = DecodeGraphs(*common)
                if self._adapter_tables is not None:
                    self.adapted_graphs = DecodeGraphs(*common, self._adapter_tables)
            if drafting is not None and own is not None:
                # A smaller model runs in chunks, so that no row of it decodes.
                rows = num_slots if drafting.join is not None else 1
                model = GpuModel(drafting, own, self.pages, self.tables, max_model_len, rows, group, target=self.model)
                drafts = model, spec.hidden_size, logits[:num_slots], draft_tokens
                own_rows = rows_of(draft_tokens, has_states=bool(self.pages.states))
                if not drafting.caches:
                    self.drafter = Assistant(*drafts, self._sampled, self._max_rows, use_graphs=in_graphs)
                    self._move_back(1, self.drafter.not_accepted)  # once, before the first step
                elif drafting.join is not None and own_rows <= MOST_SEGMENT_TOKENS:
                    self.drafter = MultiTokenLayers(*drafts, self.pages, own_rows, use_graphs=in_graphs)
                else:
                    self.drafter = DraftingLayers(SteppedGpuModel(model, self.pages), self.pages)

    @property
    def arena(self) -> torch.Tensor:
        return self.pages.arena

    @torch.inference_mode()
    def rehearse(self, tokens: int, *, leaves_snapshots: bool) -> None:
        """Run the largest step once, over pages that nobody holds yet, and measure its activations.

        What happens once (compiling kernels, workspaces) has then happened before the first request.
        """
        batches = [rehearsal(tokens, self._max_model_len)]
        if leaves_snapshots and self.pages.states:  # such chunks have kernels of their own
            batches.append(rehearsal_of_snapshots(min(tokens, self._max_model_len), self.pages.layout))
        if self.adapters is not None:  # slots are empty, but kernels do not know
            batches.append(replace(batches[0], adapters=np.ones(len(batches[0].chunks), dtype=np.int32)))
        with compiling_ahead():
            for batch in batches:
                self.forward(batch)
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        for batch in batches:
            self.forward(batch)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        self.activation_bytes = peak + self.model.prefill_scratch_bytes

    @torch.inference_mode()
    def forward(self, batch: Batch, *, all_logits_slots: frozenset[int] = frozenset()) -> StepOutput:
        """Run one step. Chunks of `all_logits_slots` also give the logits of every one of their tokens."""
        self.pages.before_step(batch.changes)
        if self.adapters is not None:
            self.adapters.before_step(batch.placed_adapters)
        if not batch.chunks and not len(batch.decode_slots):
            output = self._update_tables(batch)
        elif self._only_decodes(batch):
            output = self._decode(batch)
        else:
            assert not batch.is_ahead  # chunks are put together on the host, which has to know where they begin
            output = self._mixed(batch, all_logits_slots)
        self.pages.after_step(batch.changes)
        return output

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

    def _only_decodes(self, batch: Batch) -> bool:
        """Whether all rows of a step can be decoding rows: drafts too, where their sequences find them in pages."""
        if not batch.chunks:
            return True
        too_many = batch.num_tokens > self._max_rows or (self.pages.states and self._most_rows == 1)
        return verifies_only(batch) and not too_many

    def _update_tables(self, batch: Batch) -> StepOutput:
        """A step without rows, which only begins copies between tiers."""
        transfer, lists = Transfer(self.device), self.tables.updates(batch.changes)
        if any(len(updates) for updates in lists):
            for updates in lists:
                transfer.add(updates)
            for there in transfer.send():
                self.tables.apply(there)
        return StepOutput(self._hidden.nothing.float(), {})

    def _resolved(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens of a step, with drafts that only the device knows in the stead of their places."""
        assert isinstance(self.drafter, Assistant | MultiTokenLayers)
        return self.drafter.drafts.resolved(tokens)

    def _mixed(self, batch: Batch, all_logits_slots: frozenset[int]) -> StepOutput:
        host = Step.of(batch, all_logits_slots)
        needs_all = isinstance(self.drafter, DraftingLayers) and self.drafter.needs_all_hidden
        step = self._builder.mixed(host.whole() if needs_all else host, batch.changes)
        assert step.chunk_tokens is not None
        hidden = self._hidden.nothing
        if len(step.positions):
            chunk_tokens = self._resolved(step.chunk_tokens) if has_places(host.tokens) else step.chunk_tokens
            tokens = torch.cat([self._sampled[step.slots], chunk_tokens.long()])
            hidden = self.model.final_hidden(step, tokens)
            if isinstance(self.drafter, DraftingLayers):
                self.drafter.observe_step(host, tokens, hidden)
                hidden = hidden[to_device(host.wanted, self.device)] if needs_all else hidden
        if self.drafter is not None:
            if isinstance(self.drafter, Assistant):
                self.drafter.observe([*host.decoding_segments(), *host.wanted_segments], hidden)
            for chunk in batch.chunks:
                if chunk.hidden is not None:
                    self.drafter.know(chunk.slot, chunk.start - 1, self._hidden.row(chunk.hidden))
        hidden = self._hidden.exchange(hidden, batch, all_logits_slots)
        return split_rows(hidden, self.model.logits, batch, all_logits_slots)

    def _decode(self, batch: Batch) -> StepOutput:
        step, decoding = Step.of_rows(batch), len(batch.decode_slots)
        rows = step.num_decoding
        adapters = self._adapter_tables if len(step.adapters) else None
        graphs = self.graphs if adapters is None else self.adapted_graphs
        padded = (graphs.padded(rows) if graphs is not None else None) or rows
        inputs = np.tile(padding(self._inputs), self._max_rows)
        inputs[:2, :rows] = step.decode_slots, step.positions
        inputs[2, : len(step.state_slots)] = step.state_slots
        inputs[3:DRAFT_INPUTS, decoding:rows] = step.tokens
        several = bool(batch.chunks) and self._most_rows > 1
        together = row_segments(step, self._most_rows, padded) if several else None
        if together is not None and len(inputs) == STATE_DRAFT_INPUTS:
            inputs[DRAFT_INPUTS:, :padded] = together[:, :2].T  # slots and first positions
        transfer = Transfer(self.device)
        late, now = (transfer.add(updates) for updates in self.tables.updates(batch.changes))
        handle = transfer.add(inputs)
        wanted = transfer.add(step.wanted) if len(step.wanted) < rows else None
        table = None if together is None else transfer.add(together)
        unsettled = transfer.add(np.isin(np.arange(len(self._sampled)), batch.unsettled)) if batch.unsettled else None
        bring_adapters = None if adapters is None else adapters.add_decoding(step.adapters, padded, transfer)
        sent = transfer.send()
        self.tables.apply(sent[late])
        self.tables.apply(sent[now])
        self._inputs.copy_(sent[handle])
        if has_places(step.tokens):
            self._inputs[3].copy_(self._resolved(self._inputs[3]))
        if table is not None:
            self._segments[:padded].copy_(sent[table])
        too_far = self._move_back(padded, sent[unsettled]) if unsettled is not None else None
        if bring_adapters is not None:
            bring_adapters(sent)
        if isinstance(self.drafter, Assistant) and self._final is not None:
            self.drafter.observe(step.decoding_segments(), self._final, too_far)
        if graphs is not None and padded in graphs.sizes:
            logits = graphs.replay(rows, several=several)
        else:
            segments = self._segments[:padded] if several else None
            on_rows = None if adapters is None else adapters.decoding(rows)
            on_device = DeviceStep.decoding(self._inputs[:, :rows], segments, self._most_rows, on_rows)
            normed = self.model.final_hidden(on_device, tokens_of(self._inputs[:, :rows], self._sampled))
            if self._final is not None:
                self._final[:rows] = normed
            logits = self.model.logits(normed)
        if isinstance(self.drafter, DraftingLayers):
            final = self._hidden.nothing if self._final is None else self._final
            self.drafter.observe_step(step, tokens_of(self._inputs[:, :rows], self._sampled), final)
        logits = logits if wanted is None else logits[sent[wanted].long()]
        return StepOutput(logits, {}, too_far=None if too_far is None else too_far[self._inputs[0, :rows]])

    def _move_back(self, padded: int, unsettled: torch.Tensor) -> torch.Tensor:
        """Put the rows of a step that went ahead where they lie, now that the device knows which drafts of the step
        before were accepted; `unsettled` has 1 for slots that had some. Returns by how much each slot was too far.
        """
        assert isinstance(self.drafter, Assistant)
        (slots, positions), segments = self._inputs[:2, :padded], self._segments[:padded]
        too_far = self.drafter.not_accepted * unsettled
        positions -= too_far[slots] * (positions >= 0)  # padding stays where it is
        segments[:, 1:3] -= (too_far[segments[:, 0]] * (segments[:, 2] >= 0))[:, None]
        return too_far


def rehearsal(tokens: int, longest: int) -> Batch:
    """The largest step, of so many tokens in sequences of at most `longest`.

    It has a small chunk as well as large ones, which begin within a page: other kernels take those.
    """
    sizes = [min(longest, tokens - at) - 1 for at in range(0, tokens, longest)]
    chunks = [PromptChunk(0, 0, np.zeros(1, dtype=np.int32), samples=True)]
    chunks += [PromptChunk(0, 1, np.zeros(size, dtype=np.int32), samples=True) for size in sizes if size]
    return _batch(chunks, NO_CHANGES)


def rehearsal_of_snapshots(most_tokens: int, layout: Layout) -> Batch:
    """A small chunk that leaves its states in the middle too."""
    size = min(most_tokens, SMALL_CHUNK)
    snapshots = tuple(
        Snapshot(index, 0, (size + 1) // 2, np.zeros(group.stripes, dtype=np.int32))
        for index, group in enumerate(layout.groups)
        if isinstance(group.retention, State)
    )
    chunk = PromptChunk(0, 0, np.zeros(size, dtype=np.int32), samples=True)
    return _batch([chunk], Changes(snapshots=snapshots))


def _batch(chunks: list[PromptChunk], changes: Changes) -> Batch:
    nobody = np.zeros(0, dtype=np.int64)
    return Batch(0, nobody, nobody, chunks, np.zeros(len(chunks), dtype=np.int8), changes)
