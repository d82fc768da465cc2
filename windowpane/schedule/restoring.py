"""The scheduler's side of restore points: where requests begin with what earlier ones computed, and what they leave.

A point is entered when a step is scheduled, so that the step writes it, and can be resumed from once the step has
landed. A point inside a chunk is left as tails and snapshots; one at the end of a chunk or of a sequence is what the
sequence holds there.

`RestorePlanner` does this. `NoRestorePlanner` takes its place where prefix caching is off.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from windowpane.kv.manager import KVManager
from windowpane.kv.restore import CacheStats, Hit, RestorePoints, prompt_marks
from windowpane.kv.retention import MIN_PREFIX_TOKENS
from windowpane.kv.sharing import RestorePoint
from windowpane.kv.tier import HostTier
from windowpane.schedule.request import Request


class RestorePlanner:
    """Restore points of running requests, by their slots."""

    def __init__(self, points: RestorePoints, tier: HostTier | None = None) -> None:
        self.points = points
        self.tier = tier
        self.manager = points.manager
        self._marks: dict[int, list[int]] = {}  # where in its prompt points are wanted
        self._last_point: dict[int, int] = {}  # the last place in its prompt that has one
        self._hidden_rows: dict[int, int] = {}  # the row with the hidden state of a prompt known to its end
        self._fetched_rows: dict[int, Request] = {}  # slots whose row belongs to them until their first step
        self._ends: list[tuple[int, Request, int, int | None]] = []  # of chunks: slot, request, length, row to keep
        self._written: list[RestorePoint] = []  # points that the step being put together writes
        self._unheard: dict[Request, list[int]] = {}  # tokens sampled after a request had ended

    def look_up(self, request: Request, *, on_host: bool = True) -> Hit:
        """Return how much of the request's tokens can be resumed, from the device or, if it may, `on_host`."""
        params = request.params
        if params.prompt_logprobs is not None and len(request.prompt_logprobs) < len(request.prompt):
            return Hit(miss="prompt_logprobs asks for every prompt token")
        if request.pooling is not None:
            return Hit(miss="an embedding asks for every prompt token")
        known = request.tokens(0, request.known_tokens)
        may_skip_last = not request.output
        hit = self.points.look_up(request.prefix_key, known, may_skip_last=may_skip_last)
        if self.tier is None or not on_host or hit.hidden_row is not None:
            return hit
        return self.tier.look_up(request.prefix_key, known, hit, may_skip_last=may_skip_last)

    def admit(self, slot: int, request: Request, hit: Hit) -> None:
        """Take note of what was found, and of where this prompt should leave points."""
        if request.preemptions == 0:
            request.cached_tokens, request.cache_miss = hit.length, hit.miss
            self.points.count(len(request.prompt), hit.length)
        self._last_point[slot] = hit.length
        if hit.hidden_row is not None:
            self._hidden_rows[slot] = hit.hidden_row
            if hit.on_host is not None:
                self._fetched_rows[slot] = request
        if self.manager.keeps_all(len(request.prompt)):
            return  # the point at the prompt's end will do for all places before it
        marks = prompt_marks(
            request.message_ends, hit.branch, hit.length, len(request.prompt), few=self.manager.has_state
        )
        if marks:
            self._marks[slot] = marks

    def extend(self, slot: int, request: Request, stop: int) -> None:
        """Give a chunk its pages, leaving points inside it where they are worth their room."""
        tails, before, last = [], self._last_point[slot], self._last_point[slot]
        for mark in self._marks.get(slot, ()):
            if not self.manager.lengths[slot] < mark < stop:
                continue
            if self.points.is_kept(request.prefix_key, request.prompt[:mark]):
                before = last = mark
            elif self.points.is_worth_its_room(before, mark):
                tails.append(mark)
                before = mark
        for point in self.manager.extend_with_tails(slot, stop, tails):
            last = max(last, point.length)
            if self.points.add(request.prefix_key, request.prompt[: point.length], point):
                self._written.append(point)
        self._last_point[slot] = last

    def end_chunk(self, slot: int, request: Request, stop: int, *, at_prompt_end: bool) -> int | None:
        """Note that a chunk ends here: `close_step` leaves a point, where one is wanted.

        `at_prompt_end`: the chunk has the prompt's last token, which samples the answer's first. Returns the row in
        which that token's final hidden state is to be kept.
        """
        row = self.points.take_hidden() if at_prompt_end else None
        if at_prompt_end or stop in self._marks.get(slot, ()):
            self._ends.append((slot, request, stop, row))
        return row

    def take_hidden(self, slot: int) -> int | None:
        """The row with the final hidden state of a prompt that is known to its end."""
        row = self._hidden_rows.pop(slot, None)
        request = self._fetched_rows.pop(slot, None)
        if row is not None and request is not None and self.tier is not None:
            self.tier.keep_hidden(request.prefix_key, request.prompt, row)  # this step reads it before others write it
        return row

    def end_prompt(self, slot: int) -> None:
        self._marks.pop(slot, None)

    def close_step(self) -> tuple[Sequence[RestorePoint], Sequence[int]]:
        """Leave points where chunks of the step that was just put together end.

        Returns all points that the step writes, and the slots whose pages are shared now and must not be overwritten.
        """
        for slot, request, length, row in self._ends:
            is_worth_it = self.points.is_worth_its_room(self._last_point[slot], length)
            point = self.manager.leave_point(slot) if is_worth_it else None
            if point is None:
                self.points.give_back_hidden(row)
            elif self.points.add(request.prefix_key, request.prompt[:length], point, row):
                self._written.append(point)
                self._last_point[slot] = length
        written, slots = self._written, [slot for slot, *_ in self._ends]
        self._written, self._ends = [], []
        return written, slots

    def hear(self, request: Request, token: int) -> None:
        """Note a token sampled by a step that was in flight when the request ended: its KV can be kept too."""
        self._unheard.setdefault(request, []).append(token)

    def release(self, slot: int, request: Request, *, swap: bool) -> None:
        """Give the pages of a sequence back, leaving all that it computed as a point.

        `swap`: it comes back, and its pages are needed by others. Where there is a host tier, they are spilled first.
        """
        length, ends = int(self.manager.lengths[slot]), request.known_tokens
        if not self.manager.has_state and self.manager.shortest_truncation(slot) <= ends < length:
            # Whoever goes on from an answer does so at its end, not behind what steps in flight have made of it.
            self.manager.truncate(slot, ends)
            length = ends
        late = np.array(self._unheard.get(request, []), dtype=np.int32)
        known = np.concatenate([request.tokens(0, request.known_tokens), late])
        has_tokens = MIN_PREFIX_TOKENS <= length <= len(known)
        if has_tokens and not self.points.is_kept(request.prefix_key, known[:length]):
            point = self.manager.release_and_leave_point(slot)
            if self.points.add(request.prefix_key, known[:length], point) and swap and self.tier is not None:
                self.tier.spill(point)
        else:
            self.manager.release(slot)

    def forget(self, slot: int, request: Request) -> None:
        """The request has left its slot."""
        self._marks.pop(slot, None)
        self.take_hidden(slot)
        self._unheard.pop(request, None)

    def clear(self) -> None:
        """Give up every restore point of the device, and what was on its way between tiers."""
        if self.tier is not None:
            self.tier.forget_transfers()
        self.points.clear()
        if self.tier is not None:
            self.tier.forget_hidden()

    @property
    def stats(self) -> CacheStats:
        return self.points.stats


class NoRestorePlanner:
    """`RestorePlanner` without prefix caching: it finds nothing and leaves nothing."""

    tier = None

    def __init__(self, manager: KVManager) -> None:
        self.manager = manager

    def look_up(self, request: Request, *, on_host: bool = True) -> Hit:
        return NOTHING_FOUND

    def admit(self, slot: int, request: Request, hit: Hit) -> None:
        pass

    def extend(self, slot: int, request: Request, stop: int) -> None:
        self.manager.extend(slot, stop)

    def end_chunk(self, slot: int, request: Request, stop: int, *, at_prompt_end: bool) -> int | None:
        return None

    def take_hidden(self, slot: int) -> int | None:
        return None

    def end_prompt(self, slot: int) -> None:
        pass

    def close_step(self) -> tuple[Sequence[RestorePoint], Sequence[int]]:
        return (), ()

    def hear(self, request: Request, token: int) -> None:
        pass

    def release(self, slot: int, request: Request, *, swap: bool) -> None:
        self.manager.release(slot)

    def forget(self, slot: int, request: Request) -> None:
        pass

    def clear(self) -> None:
        pass

    @property
    def stats(self) -> CacheStats:
        return CacheStats()


NOTHING_FOUND = Hit()
