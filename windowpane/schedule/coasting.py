"""Steps in which every running sequence only gets its next token, for simulations, which need not compute them.

A coasting scheduler does what `schedule` and `commit` would do in such steps, page by page in the same order, without
batches: between page boundaries it only counts steps. This module is a part of the scheduler, whose books it shares.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from windowpane.schedule.request import NO_TOKENS
from windowpane.schedule.scheduler import Scheduler, _order


class Coasting:
    """Up to `steps` steps of a scheduler that `only_decodes`: none waits, fills or ends, and each row samples `token`,
    which stops nobody. Lengths and answers are brought up to date by `close`; pages are taken as the steps go.
    """

    def __init__(self, scheduler: Scheduler, token: int) -> None:
        self._scheduler, self._token = scheduler, token
        self.slots = scheduler.decoding_slots
        self.lengths = scheduler.manager.lengths[self.slots]  # when it begins
        self.done = 0
        self.steps = max(0, int(np.minimum.reduce(scheduler._last_length[self.slots] - self.lengths)) - 1)
        # (the step in which it takes a page, its place in the queue, slot, length when it begins)
        self._due: list[tuple[int, int, int, int]] = [
            (max(horizon - length, 0), _order(scheduler.running[slot]), slot, length)
            for slot, length, horizon in zip(
                self.slots.tolist(), self.lengths.tolist(), scheduler._horizon[self.slots].tolist(), strict=True
            )
        ]
        heapify(self._due)

    @property
    def calm_steps(self) -> int:
        """How many of the next steps take no page."""
        return min(self._due[0][0], self.steps) - self.done

    def pass_steps(self, steps: int) -> None:
        """So many calm steps at once."""
        self.done += steps

    def step(self) -> bool:
        """The next step, in which those at their horizon take pages. False: not done, because memory is short."""
        scheduler, manager = self._scheduler, self._scheduler.manager
        done, due = self.done, []
        while self._due and self._due[0][0] == done:
            due.append(heappop(self._due))
        more = [
            manager.renew_demand(slot, scheduler._next_reservation(slot))
            for _, _, slot, length in due
            if length + done + 1 > manager.reserved_tokens[slot]
        ]
        if more and not manager.can_reserve([sum(pages) for pages in zip(*more, strict=True)]):
            return False
        for _, place, slot, length in due:
            manager.lengths[slot] = length + done
            scheduler._grow(slot, NO_TOKENS)
            heappush(self._due, (max(int(scheduler._horizon[slot]) - length, done + 1), place, slot, length))
        manager.take_changes()
        self.done += 1
        return True

    def close(self) -> None:
        """Let the scheduler have these steps behind it."""
        manager, steps = self._scheduler.manager, self.done
        manager.lengths[self.slots] = self.lengths + steps
        if steps % 2:
            manager.flip_states(self.slots)
        for slot in self.slots.tolist():
            self._scheduler.running[slot].output.extend([self._token] * steps)
        self._scheduler._step += steps
