"""Assistants of Gemma 4 on a GPU: all drafts of a step in one graph, of which the host waits for the last alone.

An assistant's layers have queries only and read what its target keeps. So a row of it is a segment without tokens of
its own: it stands at the last token that the target has computed, and finds that one in pages like those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from windowpane.device.transfer import Transfer
from windowpane.drafts.drafter import Known
from windowpane.kv.changes import NO_CHANGES
from windowpane.lowering.gpu.model import GpuModel
from windowpane.lowering.gpu.step import DeviceStep
from windowpane.runners.graphs import capture, ladder, next_size
from windowpane.schedule.batch import NO_TOKENS
from windowpane.schedule.request import Tokens
from windowpane.schedule.step import Segment

ROWS_AT_ONCE = 2  # the fewest that the kernels take, of which each segment has one


class Assistant:
    """Drafts for the slots of its target, whose `logits` [slots, vocabulary] are its scratch between two steps."""

    def __init__(
        self, model: GpuModel, width: int, logits: torch.Tensor, most_drafts: int, *, use_graphs: bool
    ) -> None:
        self._model, self._logits, slots, device = model, logits, len(logits), logits.device
        self._places = torch.zeros(2, slots, dtype=torch.int32, device=device)  # positions and tokens
        self._segments = torch.zeros(slots, len(Segment._fields), dtype=torch.int32, device=device)
        self._before = torch.zeros(slots, width, dtype=model.embedding.dtype, device=device)
        self._drafts = torch.zeros(most_drafts, slots, dtype=torch.int32, device=device)
        # Final hidden states of the target's last step, and where those of a slot lie: position, row, count.
        self._hidden, self._rows = self._before[:0], dict[int, tuple[int, int, int]]()
        self._known: dict[int, tuple[int, torch.Tensor]] = {}
        self._sizes, self._graphs = ladder(slots), dict[int, torch.cuda.CUDAGraph]()
        if use_graphs:
            pool = torch.cuda.graph_pool_handle()
            self._send([], slots)
            for size in reversed(self._sizes):
                self._graphs[size] = capture(lambda size=size: self._draft(size), pool)  # type: ignore[misc]

    def observe(self, segments: Iterable[Segment], hidden: torch.Tensor) -> None:
        """A step of the target: `hidden` has the final states of the rows that these segments ask for."""
        self._hidden = hidden
        self._rows = {s.slot: (s.stop - s.q_count, s.q_row, s.q_count) for s in segments if s.q_count}
        for slot in self._rows:
            self._known.pop(slot, None)

    def know(self, slot: int, position: int, state: torch.Tensor) -> None:
        """The hidden state [1, width] of a prompt's last token, which was not computed again."""
        self._known[slot] = position, state

    @torch.inference_mode()
    def draft(self, known: Sequence[Known]) -> list[Tokens]:
        found = [(k, source) for k in known if (source := self._source(k)) is not None]
        if not found:
            return [NO_TOKENS] * len(known)
        size = next_size(self._sizes, len(found)) if self._graphs else len(found)
        assert size is not None  # there is one for all slots
        rows = self._send([k for k, _ in found], size, [s if isinstance(s, int) else 0 for _, s in found])
        if len(self._hidden):
            torch.index_select(self._hidden, 0, rows, out=self._before[: len(found)])
        for row, (_, source) in enumerate(found):
            if isinstance(source, torch.Tensor):
                self._before[row] = source[0]
        if self._graphs:
            self._graphs[size].replay()
        else:
            self._draft(size)
        drafts = iter(self._drafts[:, : len(found)].cpu().numpy().T)
        having = {k.slot for k, _ in found}
        return [next(drafts)[: k.most].copy() if k.slot in having else NO_TOKENS for k in known]

    def _source(self, asked: Known) -> int | torch.Tensor | None:
        """The row of `_hidden` that a request's drafts begin with, or that hidden state; None where it is not known."""
        position, state = self._known.get(asked.slot, (-1, None))
        if state is not None:
            return state if position == asked.length - 1 else None
        first, row, count = self._rows.get(asked.slot, (0, 0, 0))
        at = asked.length - 1 - first
        return row + at if 0 <= at < count else None

    def _send(self, known: Sequence[Known], size: int, rows: Sequence[int] = ()) -> torch.Tensor:
        """Where the next drafts stand, and padding up to a size; returns `rows` on the device."""
        count, tables = len(known), self._model.tables
        places = np.tile(np.array([[-1], [0]], dtype=np.int32), size)
        places[:, :count] = [k.length - 1 for k in known], [k.tokens[0] for k in known]
        segments = [Segment(k.slot, k.length, k.length, 0, row, 1) for row, k in enumerate(known)]
        segments += [Segment(0, -1, -1, 0, row, 1) for row in range(count, size)]
        transfer = Transfer(self._places.device)
        late, _ = tables.updates(NO_CHANGES)  # pages that the last step has written are there to be read now
        arrays = places, np.array(segments), np.array(rows), late
        sent_places, sent_segments, sent_rows, sent_late = (transfer.add(array) for array in arrays)
        sent = transfer.send()
        tables.apply(sent[sent_late])
        self._places[:, :size].copy_(sent[sent_places])
        self._segments[:size].copy_(sent[sent_segments])
        return sent[sent_rows]

    def _draft(self, size: int) -> None:
        positions, tokens = self._places[0, :size], self._places[1, :size].long()
        step, before = DeviceStep.asking(positions, self._segments[:size], ROWS_AT_ONCE), self._before[:size]
        for drafts in self._drafts[:, :size]:
            normed = self._model.final_hidden(step, tokens, before)
            tokens = self._model.logits(normed, self._logits[:size]).argmax(dim=-1)
            drafts.copy_(tokens)
            before = self._model.passed_on(normed)
