"""Drafters that are models: layers for multi-token prediction, assistants of Gemma 4, and smaller models.

`observe_step` sees every step of the target, so that a drafter's own K and V lie in pages as the target's do, and are
shared, restored and taken back with them. `draft` writes nothing: rows that the target has not computed, or has to
compute again, are the present of each of its steps.

    position     0        1        2     │   3            4
    tokens       x0       x1       x2    │   x3           x4     known; the target has computed those before x4
    own rows   (h0 x1)  (h1 x2)  (h2 x3) │ (h3 x4) ─► x5  (g4 x5) ─► x6

A drafter that joins has, at a token's position, what that token's hidden state h and the next token make. Behind the
last one that the target has computed, hidden states g are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from windowpane.device.pages import KVPages
from windowpane.device.transfer import to_device
from windowpane.drafts.drafter import HostKnows, Known
from windowpane.models.blocks import Decoder
from windowpane.schedule.request import NO_TOKENS, Tokens
from windowpane.schedule.step import Segment, Step

KEPT_ROWS = 18  # hidden states of a slot's last tokens: of a step with drafts, and the one before


class SteppedModel(Protocol):
    """A drafter's model as it takes steps: `ReferenceModel`, or a GPU's."""

    decoder: Decoder

    def final_hidden(
        self, step: Step, tokens: torch.Tensor, pages: KVPages, before: torch.Tensor | None = None, *, keeps: bool
    ) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def passed_on(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _Hidden:
    """Final hidden states of a slot's tokens from position `first` on, and that of the one before, if it is known."""

    first: int
    rows: torch.Tensor
    earlier: torch.Tensor | None = None

    def range(self, start: int, stop: int) -> torch.Tensor | None:
        if not start < stop <= self.first + len(self.rows):
            return None
        if start == self.first - 1 and self.earlier is not None:
            return torch.cat([self.earlier, self.rows[: stop - self.first]])
        return self.rows[start - self.first : stop - self.first] if start >= self.first else None


class DraftingLayers(HostKnows):
    """A drafter's model over its target's pages. `needs_all_hidden`: it takes hidden states of all rows."""

    def __init__(self, model: SteppedModel, pages: KVPages) -> None:
        self.model, self._pages = model, pages
        self._joins, self._keeps = model.decoder.join is not None, bool(model.decoder.caches)
        self.needs_all_hidden = self._joins and self._keeps
        self._hidden: dict[int, _Hidden] = {}  # by slot

    # -- what the target computes ------------------------------------------------------------------------------------

    def observe_step(self, step: Step, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """A step of the target: the tokens of all its rows, and final hidden states of those that are wanted, or of all
        where they are needed.
        """
        rows = _sequences(step, step.segments)
        if self._joins:
            asked = rows if self.needs_all_hidden else _sequences(step, step.wanted_segments)
            if self.needs_all_hidden and rows:
                self._fill(*self._joined_rows(rows, tokens, hidden))
            if asking := [segment for segment in asked if segment.q_count]:
                self._remember(asking, hidden)
        elif rows:
            self._fill(rows, tokens, None)

    def know(self, slot: int, position: int, state: torch.Tensor) -> None:
        """The hidden state [1, width] of a prompt's last token, which was not computed again."""
        self._hidden[slot] = _Hidden(position, state)

    def _joined_rows(
        self, segments: Sequence[Segment], tokens: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[list[Segment], torch.Tensor, torch.Tensor]:
        """Rows for the positions before the last of each segment, and for the last with a token that is made up: the
        next one is not known yet, and a row that nobody wrote could be anything. It is written again with that token.
        """
        found, following, before = [], [], []
        for slot, start, stop, row, _, _ in segments:
            own, earlier = tokens[row : row + stop - start], self._states(slot, start - 1, start)
            following += [own[0 if earlier is not None else 1 :], own[-1:]]
            before += (
                [hidden[row : row + stop - start]] if earlier is None else [earlier, hidden[row : row + stop - start]]
            )
            found.append(Segment(slot, start - (earlier is not None), stop, 0, 0, 0))
        return found, torch.cat(following), torch.cat(before)

    def _fill(self, segments: Sequence[Segment], tokens: torch.Tensor, before: torch.Tensor | None) -> None:
        """Store the drafter's K and V of these rows, and compute nothing else."""
        self._run(_step(segments, asking=0), tokens, before)

    def _remember(self, segments: Sequence[Segment], hidden: torch.Tensor) -> None:
        """Keep the last rows that each of them asks for, all by one copy: the next step makes others in their place."""
        counts = [min(s.q_count, KEPT_ROWS) for s in segments]
        rows = [s.q_row + s.q_count - n + np.arange(n) for s, n in zip(segments, counts, strict=True)]
        kept = hidden[to_device(np.concatenate(rows), hidden.device)]
        for segment, part in zip(segments, torch.split_with_sizes(kept, counts), strict=True):
            first = segment.stop - len(part)
            self._hidden[segment.slot] = _Hidden(first, part, self._states(segment.slot, first - 1, first))

    def _states(self, slot: int, start: int, stop: int) -> torch.Tensor | None:
        found = self._hidden.get(slot)
        return None if found is None else found.range(start, stop)

    # -- drafting ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def draft(self, known: Sequence[Known]) -> list[Tokens]:
        """The host waits for the last draft alone: those before it stay on the device, where the next one begins."""
        begun = [self._begin(k) for k in known]
        drafting = [d for d in begun if d is not None]
        if not drafting:
            return [NO_TOKENS] * len(known)
        there = to_device(np.concatenate([d.known for d in drafting]).astype(np.int64), self._pages.device)
        for d, tokens in zip(drafting, torch.split_with_sizes(there, [len(d.known) for d in drafting]), strict=True):
            d.tokens = [tokens]
        for place in range(max(d.most for d in drafting)):
            self._draft_one([d for d in drafting if d.most > place])
        found = iter(torch.cat([token for d in drafting for token in d.tokens[1:]]).tolist())
        return [NO_TOKENS if d is None else np.array([next(found) for _ in range(d.most)], np.int32) for d in begun]

    def _begin(self, known: Known) -> _Drafting | None:
        """None where the hidden states to begin with are not known."""
        first, tokens = known.length, known.tokens
        if not self._joins:
            return _Drafting(known.slot, first, tokens, known.most)
        before = self._states(known.slot, first - 1, first - 1 + len(tokens))
        return None if before is None else _Drafting(known.slot, first - 1, tokens, known.most, [before])

    def _draft_one(self, drafting: Sequence[_Drafting]) -> None:
        """One more token of each."""
        if self._keeps:
            step = _step([Segment(d.slot, d.first, d.stop, 0, 0, 0) for d in drafting], asking=1)
            tokens, before = [t for d in drafting for t in d.tokens], [rows for d in drafting for rows in d.before]
        else:  # a row at the last token that the target has computed, whose K and V are the target's
            step = _decoding_step([d.slot for d in drafting], [d.first for d in drafting])
            tokens, before = [d.tokens[-1][-1:] for d in drafting], [d.before[-1][-1:] for d in drafting]
        hidden = self._run(step, torch.cat(tokens), torch.cat(before) if before else None, keeps=False)
        found, passed_on = self.model.logits(hidden).argmax(dim=-1), self.model.passed_on(hidden)
        for at, d in enumerate(drafting):
            d.add(found[at : at + 1], passed_on[at : at + 1])

    def _run(
        self, step: Step, tokens: torch.Tensor, before: torch.Tensor | None, *, keeps: bool = True
    ) -> torch.Tensor:
        self._pages.forget_rows()
        hidden = self.model.final_hidden(step, tokens, self._pages, before, keeps=keeps)
        self._pages.forget_rows()
        return hidden


@dataclass(slots=True)
class _Drafting:
    """A sequence whose tokens from position `first` on are drafted from: those that are known, then drafts.

    `tokens` has them on the device: the known ones, and each draft. `before` has the hidden states that stand beside
    them, in pieces, where the drafter takes them.
    """

    slot: int
    first: int
    known: Tokens
    most: int
    before: list[torch.Tensor] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.first + len(self.known) + len(self.tokens) - 1

    def add(self, token: torch.Tensor, passed_on: torch.Tensor) -> None:
        self.tokens.append(token)
        if self.before:
            self.before.append(passed_on)


def _sequences(step: Step, segments: Sequence[Segment]) -> list[Segment]:
    """All of a step as segments."""
    return [*step.decoding_segments(), *segments]


def _step(segments: Sequence[Segment], *, asking: int) -> Step:
    """These tokens of each slot, one segment's rows behind another's, of which so many of the last ones ask."""
    every, wanted, row = [], [], 0
    for at, segment in enumerate(segments):
        count = segment.stop - segment.start
        every.append(segment._replace(row=row, q_row=row, q_count=count))
        wanted.append(segment._replace(row=row, q_row=at * asking, q_count=asking))
        row += count
    ends = np.cumsum([s.stop - s.start for s in segments])
    return Step(
        NO_TOKENS, np.concatenate([np.arange(s.start, s.stop) for s in segments]), np.zeros(0, dtype=np.int64),
        tuple(every), tuple(wanted), ends - 1 if asking else ends[:0], np.zeros(len(segments), dtype=np.int8),
    )  # fmt: skip


def _decoding_step(slots: Sequence[int], positions: Sequence[int]) -> Step:
    rows = np.arange(len(slots))
    return Step(NO_TOKENS, np.array(positions), np.array(slots), (), (), rows, np.zeros(len(slots), dtype=np.int8))
