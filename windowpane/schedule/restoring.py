"""What running requests take from earlier ones and leave for later ones: the scheduler's side of restore points.

They are entered when a step is scheduled, so that the step writes them, and can be resumed from once it has landed.
Inside a chunk they are left as tails, at its end and at a sequence's end as what the sequence holds there.
"""

from __future__ import annotations

import numpy as np

from windowpane.kv.restore import Hit, RestorePoints, prompt_marks
from windowpane.kv.retention import MIN_PREFIX_TOKENS
from windowpane.kv.sharing import Retained
from windowpane.schedule.request import Request


class Keeping:
    """Restore points of running requests, by their slots."""

    def __init__(self, points: RestorePoints) -> None:
        self.points = points
        self.manager = points.manager
        self._marks: dict[int, list[int]] = {}  # where in its prompt points are wanted
        self._last_point: dict[int, int] = {}  # the last place in its prompt that has one
        self._hidden: dict[int, int] = {}  # the row with the hidden state of a prompt known to its end
        self._ends: list[tuple[int, Request, int, int | None]] = []  # of chunks: slot, request, length, row to keep
        self._written: list[Retained] = []  # points that the step being put together writes
        self._unheard: dict[Request, list[int]] = {}  # tokens sampled after a request had ended

    def look_up(self, request: Request) -> Hit:
        """What is known of the request's tokens."""
        params = request.params
        if params.prompt_logprobs is not None and len(request.prompt_logprobs) < len(request.prompt):
            return Hit(miss="prompt_logprobs asks for every prompt token")
        known = request.tokens(0, request.known_tokens)
        return self.points.look_up(request.cache_salt, known, may_skip_last=not request.output)

    def admit(self, slot: int, request: Request, hit: Hit) -> None:
        """Take note of what was found, and of where this prompt should leave points."""
        if request.preemptions == 0:
            request.cached_tokens, request.cache_miss = hit.length, hit.miss
            self.points.count(len(request.prompt), hit.length)
        self._last_point[slot] = hit.length
        if hit.hidden is not None:
            self._hidden[slot] = hit.hidden
        if self.manager.keeps_all(len(request.prompt)):
            return  # the point at the prompt's end will do for all places before it
        marks = prompt_marks(
            request.message_ends, hit.branch, hit.length, len(request.prompt), one_only=self.manager.has_state
        )
        if marks:
            self._marks[slot] = marks

    def marks(self, slot: int, start: int) -> list[int]:
        """Lengths beyond `start` at which this prompt should leave points."""
        return [mark for mark in self._marks.get(slot, ()) if mark > start]

    def take_hidden(self, slot: int) -> int | None:
        """The row with the final hidden state of a prompt that is known to its end."""
        return self._hidden.pop(slot, None)

    def extend(self, slot: int, request: Request, stop: int) -> None:
        """Give a chunk its pages, leaving points inside it where they are worth their room."""
        tails, before = [], self._last_point[slot]
        for mark in self.marks(slot, int(self.manager.lengths[slot])):
            if mark >= stop:
                break
            if self.points.is_kept(request.cache_salt, request.prompt[:mark]):
                before = mark
            elif self.points.is_worth_its_room(before, mark):
                tails.append(mark)
                before = mark
        self._last_point[slot] = before
        for kept in self.manager.extend_with_tails(slot, stop, tails):
            if self.points.add(request.cache_salt, request.prompt[: kept.length], kept):
                self._written.append(kept)

    def end_chunk(self, slot: int, request: Request, stop: int, *, at_prompt_end: bool) -> int | None:
        """A chunk ends here: a point is kept once the step is put together, where one is wanted.

        `at_prompt_end`: with the prompt's last token, which samples the answer's first. Returns the row in which that
        token's final hidden state is to be kept.
        """
        row = self.points.take_hidden() if at_prompt_end else None
        if at_prompt_end or stop in self._marks.get(slot, ()):
            self._ends.append((slot, request, stop, row))
        return row

    def end_prompt(self, slot: int) -> None:
        self._marks.pop(slot, None)

    def close_step(self) -> tuple[list[Retained], list[int]]:
        """Keep points where chunks of the step that was just put together end.

        Returns all points that it writes, and the slots whose pages are shared now and must not be overwritten.
        """
        for slot, request, length, row in self._ends:
            is_worth_it = self.points.is_worth_its_room(self._last_point[slot], length)
            kept = self.manager.retain(slot) if is_worth_it else None
            if kept is None:
                self.points.give_back_hidden(row)
            elif self.points.add(request.cache_salt, request.prompt[:length], kept, row):
                self._written.append(kept)
                self._last_point[slot] = length
        written, slots = self._written, [slot for slot, *_ in self._ends]
        self._written, self._ends = [], []
        return written, slots

    def hear(self, request: Request, token: int) -> None:
        """A step that was in flight when the request ended has sampled this: its KV is there, so it may be kept."""
        self._unheard.setdefault(request, []).append(token)

    def release(self, slot: int, request: Request) -> None:
        """A sequence gives its pages back, leaving all that it computed as a point."""
        length = int(self.manager.lengths[slot])
        late = np.array(self._unheard.get(request, []), dtype=np.int32)
        known = np.concatenate([request.tokens(0, request.known_tokens), late])
        has_tokens = MIN_PREFIX_TOKENS <= length <= len(known)
        if has_tokens and not self.points.is_kept(request.cache_salt, known[:length]):
            self.points.add(request.cache_salt, known[:length], self.manager.release_and_keep(slot))
        else:
            self.manager.release(slot)

    def forget(self, slot: int, request: Request) -> None:
        """The request has left its slot."""
        self._marks.pop(slot, None)
        self._hidden.pop(slot, None)
        self._unheard.pop(request, None)
