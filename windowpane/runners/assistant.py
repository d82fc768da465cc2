"""Assistants of Gemma 4 on a GPU: all drafts of a step in one graph, which the host does not wait for.

An assistant's layers have queries only and read what its target keeps. So a row of it is a segment without tokens of
its own: it stands at the last token that the target has computed, and finds that one in pages like those before it.

Behind a step with drafts, which of them are accepted is found out on the device (`begin`), so that the next ones are
made while the host takes in the tokens of that step. The host may even send off the step that verifies them before: its
rows are then moved back by as many as were `not_accepted`, and begin with the last token that was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from windowpane.device.transfer import HostCopy, Transfer
from windowpane.drafts.drafter import Asking, Known
from windowpane.kv.changes import NO_CHANGES
from windowpane.lowering.gpu.model import GpuModel
from windowpane.lowering.gpu.step import FEWEST_ROWS, NO_DRAFT, DeviceStep
from windowpane.runners.device_drafts import DeviceDrafts
from windowpane.runners.graphs import DraftGraphs
from windowpane.schedule.request import NO_TOKENS, Tokens
from windowpane.schedule.step import Segment


class Assistant:
    """Drafts for the slots of its target, whose `logits` [slots, vocabulary] are its scratch between two steps."""

    def __init__(
        self, model: GpuModel, width: int, logits: torch.Tensor, most_drafts: int, sampled: torch.Tensor,
        rows_ahead: int, *, use_graphs: bool,
    ) -> None:  # fmt: skip
        self._model, self._logits, slots, device = model, logits, len(logits), logits.device
        self.rows_ahead = rows_ahead
        # By slot: the last token of its last step that verified drafts, and how many of them were not accepted.
        self._sampled, self.not_accepted = sampled, torch.zeros(slots, dtype=torch.int32, device=device)
        self._too_far: torch.Tensor | None = None  # by slot: positions in `_rows` are too far by so much
        self._places = torch.zeros(2, slots, dtype=torch.int32, device=device)  # positions and tokens
        self._segments = torch.zeros(slots, len(Segment._fields), dtype=torch.int32, device=device)
        self._before = torch.zeros(slots, width, dtype=model.embedding.dtype, device=device)
        self.drafts = DeviceDrafts(most_drafts, slots, device)
        # Final hidden states of the target's last step, and where those of a slot lie: position, row, count.
        self._hidden, self._rows = self._before[:0], dict[int, tuple[int, int, int]]()
        self._known: dict[int, tuple[int, torch.Tensor]] = {}
        # Of drafts that were begun on the device: their slots, and the drafts as they will be known.
        self._begun: tuple[Sequence[int], HostCopy] | None = None
        if use_graphs:
            self._send([], slots)
        self._graphs = DraftGraphs(self._draft, slots, use_graphs=use_graphs)
        if use_graphs:  # what happens once is not to happen in the first step
            self.observe([Segment(0, 0, 1, 0, 0, 1)], self._before[:1].clone())
            self.begin([0], [NO_TOKENS], sampled[:1].clone())
            self.observe([], self._before[:0])

    def observe(self, segments: Iterable[Segment], hidden: torch.Tensor, too_far: torch.Tensor | None = None) -> None:
        """A step of the target: `hidden` has the final states of the rows that these segments ask for. Segments may lie
        `too_far`, by slot, which only the device knows.
        """
        self._hidden, self._begun, self._too_far = hidden, None, too_far
        self._rows = {s.slot: (s.stop - s.q_count, s.q_row, s.q_count) for s in segments if s.q_count}
        for slot in self._rows:
            self._known.pop(slot, None)

    def know(self, slot: int, position: int, state: torch.Tensor) -> None:
        """The hidden state [1, width] of a prompt's last token, which was not computed again."""
        self._known[slot] = position, state

    @torch.inference_mode()
    def begin(self, slots: Sequence[int], drafts: Sequence[Tokens], sampled: torch.Tensor) -> bool:
        asked, first, most = list[int](), list[tuple[int, int, int]](), len(self.drafts.made)
        counts = np.array([len(tokens) for tokens in drafts])
        verified = np.full((len(slots), most), NO_DRAFT)
        for at, (slot, tokens) in enumerate(zip(slots, drafts, strict=True)):
            verified[at, : len(tokens)] = tokens
            if slot in self._rows and slot not in self._known:
                start, row, count = self._rows[slot]
                skipped = count - 1 - len(tokens)  # rows of a prompt that ask for logits and sample nothing
                asked.append(slot)
                first.append((at, start + skipped, row + skipped))
        count, size = len(asked), self._graphs.size(max(len(asked), 1))
        places, verifying = [(slot, 0, 0) for slot in asked], (slots, np.cumsum(1 + counts) - 1 - counts, counts)
        # The first of each slot's rows: in `sampled`; and of those who ask, in its sequence and in `_hidden`.
        all_slots, expected, asking = self._send(
            places, size, np.array(verifying), verified, np.array(first).reshape(-1, 3).T
        )
        of_slot, rows, given = all_slots
        drawn = sampled[(rows[:, None] + torch.arange(most + 1, device=sampled.device)).clamp(max=len(sampled) - 1)]
        accepted = (drawn[:, :-1] == self.drafts.resolved(expected)).int().cumprod(dim=1).sum(dim=1)
        last = drawn.gather(1, accepted[:, None])[:, 0]
        gained = accepted if self._too_far is None else accepted - self._too_far[of_slot]
        self._sampled[of_slot] = last
        self.not_accepted[of_slot] = (given - accepted).int()
        if not asked:
            return True
        index, positions, hidden_rows = asking
        self._places[0, :count] = positions + gained[index]
        self._places[1, :count] = last[index]
        self._segments[:count, 1:3] = (positions + gained[index] + 1)[:, None]
        torch.index_select(self._hidden, 0, hidden_rows + accepted[index], out=self._before[:count])
        self._graphs.run(self._draft, size)
        self._begun = asked, self.drafts.copy(count)
        return True

    @torch.inference_mode()
    def draft(self, known: Sequence[Known]) -> list[Tokens]:
        if self._begun is not None:
            # Behind a step that went ahead, nothing else can be begun with.
            if self._too_far is not None or {k.slot for k in known} <= set(self._begun[0]):
                return self.ahead(known)
            self._begun = None
        found = [(k, source) for k in known if (source := self._source(k)) is not None]
        if not found:
            return [NO_TOKENS] * len(known)
        size = self._graphs.size(len(found))
        places = [(k.slot, k.length - 1, int(k.tokens[0])) for k, _ in found]
        [rows] = self._send(places, size, np.array([s if isinstance(s, int) else 0 for _, s in found]))
        if len(self._hidden):
            torch.index_select(self._hidden, 0, rows, out=self._before[: len(found)])
        for row, (_, source) in enumerate(found):
            if isinstance(source, torch.Tensor):
                self._before[row] = source[0]
        self._graphs.run(self._draft, size)
        return self.drafts.hand_out(known, [k.slot for k, _ in found], self.drafts.copy(len(found)))

    def ahead(self, asking: Sequence[Asking] | Sequence[Known]) -> list[Tokens]:
        """What was begun on the device, where it was: behind the tokens that these have, since the host counts those
        that are accepted as the device does.
        """
        return [NO_TOKENS] * len(asking) if self._begun is None else self.drafts.hand_out(asking, *self._begun)

    def tell(self, drafts: Sequence[Tokens]) -> list[Tokens]:
        return self.drafts.tell(drafts)

    def _source(self, asked: Known) -> int | torch.Tensor | None:
        """The row of `_hidden` that a request's drafts begin with, or that hidden state; None where it is not known."""
        position, state = self._known.get(asked.slot, (-1, None))
        if state is not None:
            return state if position == asked.length - 1 else None
        first, row, count = self._rows.get(asked.slot, (0, 0, 0))
        at = asked.length - 1 - first
        return row + at if 0 <= at < count and self._too_far is None else None

    def _send(
        self, places: Sequence[tuple[int, int, int]], size: int, *more: NDArray[np.integer[Any]]
    ) -> list[torch.Tensor]:
        """Slots, positions and tokens that the next drafts begin with, padded to a size; returns `more` on the device.

        A padding row has position -1, and its segment reads nothing.
        """
        tables, unused = self._model.tables, [(-1, 0)] * (size - len(places))
        rows = [(position, token) for _, position, token in places] + unused
        segments = [Segment(slot, at + 1, at + 1, 0, row, 1) for row, (slot, at, _) in enumerate(places)]
        segments += [Segment(0, -1, -1, 0, row, 1) for row in range(len(places), size)]
        transfer = Transfer(self._places.device)
        late, _ = tables.updates(NO_CHANGES)  # pages that the last step has written are there to be read now
        arrays = np.array(rows).T, np.array(segments), late, *more
        sent_places, sent_segments, sent_late, *sent_more = (transfer.add(array) for array in arrays)
        sent = transfer.send()
        tables.apply(sent[sent_late])
        self._places[:, :size].copy_(sent[sent_places])
        self._segments[:size].copy_(sent[sent_segments])
        return [sent[handle] for handle in sent_more]

    def _draft(self, size: int) -> None:
        positions, tokens = self._places[0, :size], self._places[1, :size].long()
        step, before = DeviceStep.asking(positions, self._segments[:size], FEWEST_ROWS), self._before[:size]
        for drafts in self.drafts.made[:, :size]:
            normed = self._model.final_hidden(step, tokens, before)
            tokens = self._model.logits(normed, self._logits[:size]).argmax(dim=-1)
            drafts.copy_(tokens)
            before = self._model.passed_on(normed)
