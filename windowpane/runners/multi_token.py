"""Layers for multi-token prediction on a GPU: all drafts of a step in one graph, which the host does not wait for.

What the layers keep of the target's rows is stored as `DraftingLayers` does it. Rows that are drafted from are kept
nowhere: each sequence has a fixed number of them, and those behind its known tokens are filled with its drafts one by
one. Every draft computes K and V of all of them once more, which costs little beside the launches that a graph saves,
and asks from the last one alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from windowpane.device.pages import KVPages
from windowpane.device.transfer import Transfer
from windowpane.drafts.drafter import Known
from windowpane.kv.changes import NO_CHANGES
from windowpane.lowering.gpu.model import GpuModel
from windowpane.lowering.gpu.step import FEWEST_ROWS, MOST_SEGMENT_TOKENS, DeviceStep, PageWrites, Sequences
from windowpane.lowering.gpu.stepped import SteppedGpuModel
from windowpane.runners.device_drafts import DeviceDrafts
from windowpane.runners.drafting import DraftingLayers
from windowpane.runners.graphs import DraftGraphs
from windowpane.schedule.request import NO_TOKENS, Tokens
from windowpane.schedule.step import Segment


def rows_of(most_drafts: int, *, has_states: bool) -> int:
    """Of a sequence: known tokens that the target has not computed, or computes again for its state, and all drafts but
    the last.
    """
    return (1 + most_drafts if has_states else 1) + most_drafts - 1


class MultiTokenLayers(DraftingLayers):
    """`logits` [slots, vocabulary] are the target's scratch between two steps; each sequence has `rows`."""

    def __init__(
        self, model: GpuModel, width: int, logits: torch.Tensor, most_drafts: int, pages: KVPages, rows: int, *,
        use_graphs: bool,
    ) -> None:  # fmt: skip
        super().__init__(SteppedGpuModel(model, pages), pages)
        assert rows <= MOST_SEGMENT_TOKENS
        self._gpu, self._logits, self._rows, self._most = model, logits, rows, most_drafts
        slots, device = len(logits), logits.device
        self._tokens = torch.zeros(slots * rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(slots * rows, dtype=torch.int32, device=device)
        self._before = torch.zeros(slots * rows, width, dtype=model.embedding.dtype, device=device)
        self._segments = torch.zeros(slots, len(Segment._fields), dtype=torch.int32, device=device)
        self._last = torch.zeros(2, slots, dtype=torch.int64, device=device)  # the last row, and 1 where there is one
        self.drafts = DeviceDrafts(most_drafts, slots, device)
        nothing = self._positions[:0]
        self._writes = [PageWrites(nothing, nothing.expand(group.stripes, 0), nothing) for group in pages.layout.groups]
        if use_graphs:
            self._send([], slots)
        self._graphs = DraftGraphs(self._draft_all, slots, use_graphs=use_graphs)

    @torch.inference_mode()
    def draft(self, known: Sequence[Known]) -> list[Tokens]:
        found = [(k, states) for k in known if (states := self._states_of(k)) is not None]
        if not found:
            return [NO_TOKENS] * len(known)
        having, size = [k for k, _ in found], self._graphs.size(len(found))
        rows = self._send(having, size)
        self._before.index_copy_(0, rows, torch.cat([states for _, states in found]))
        self._graphs.run(self._draft_all, size)
        return self.drafts.hand_out(known, [k.slot for k in having], self.drafts.copy(len(having)))

    def tell(self, drafts: Sequence[Tokens]) -> list[Tokens]:
        return self.drafts.tell(drafts)

    def _states_of(self, known: Known) -> torch.Tensor | None:
        """Hidden states of the tokens before the known ones."""
        return self._states(known.slot, known.length - 1, known.length - 1 + len(known.tokens))

    def _send(self, known: Sequence[Known], size: int) -> torch.Tensor:
        """What the first drafts are made from, but for hidden states, whose rows are returned.

        A sequence of padding has rows at position -1, and its segment reads nothing.
        """
        shape = size, self._rows
        tokens, positions, rows = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), list[int]()
        segments = [Segment(0, -1, -1, s * self._rows, s, 1) for s in range(size)]
        last = np.array([[s * self._rows for s in range(size)], [0] * size])
        for s, k in enumerate(known):
            count, first = len(k.tokens), k.length - 1
            tokens[s, :count], positions[s, :count] = k.tokens, np.arange(first, first + count)
            segments[s] = Segment(k.slot, first, first + count, s * self._rows, s, 1)
            last[:, s] = s * self._rows + count - 1, 1
            rows += range(s * self._rows, s * self._rows + count)
        transfer, tables = Transfer(self._tokens.device), self._gpu.tables
        late, _ = tables.updates(NO_CHANGES)  # pages that the last step has written are there to be read now
        arrays = tokens.reshape(-1), positions.reshape(-1), np.array(segments), last, np.array(rows, np.int32), late
        handles = [transfer.add(array) for array in arrays]
        sent = transfer.send()
        *parts, there, updates = (sent[handle] for handle in handles)
        tables.apply(updates)
        count = size * self._rows
        targets = (self._tokens[:count], self._positions[:count], self._segments[:size], self._last[:, :size])
        for target, part in zip(targets, parts, strict=True):
            target.copy_(part)
        return there.long()

    def _draft_all(self, size: int) -> None:
        count = size * self._rows
        tokens, positions, before = self._tokens[:count], self._positions[:count], self._before[:count]
        segments, (last, is_real) = self._segments[:size], self._last[:, :size]
        nobody = Sequences(positions[:0], positions[:0], positions[:0])
        for number, drafts in enumerate(self.drafts.made[:, :size]):
            step = DeviceStep(
                positions, positions, nobody, wanted=last, writes=self._writes, segments=segments, most_rows=FEWEST_ROWS
            )
            normed = self._gpu.final_hidden(step, tokens, before)
            found = self._gpu.logits(normed, self._logits[:size]).argmax(dim=-1)
            drafts.copy_(found)
            if number + 1 < self._most:
                following = positions[last] + is_real.int()
                last += is_real  # padding stays where it is, however often it is run
                positions.index_copy_(0, last, following)
                tokens.index_copy_(0, last, found)
                before.index_copy_(0, last, self._gpu.passed_on(normed))
                segments[:, 2] += is_real.int()
