"""The scheduler: every request has tokens known and tokens computed; each step closes the gap under a token budget.

    add ─► waiting ─► running: prefilling ─► decoding ─► finished
              ▲                    │             │
              └──── preempted ◄────┴─────────────┘        (only a renewal preempts)

A request is admitted when its whole prompt and the next `growth_tokens` can be reserved, so that once it runs it never
waits for memory until that is used up. Decoding requests live in arrays and are advanced together; Python looks at one
of them only when it reaches its *horizon*: a page boundary, the end of its reservation or of its life.

With restore points (`restoring`), an admitted request begins with what it shares with an earlier one, and leaves points
of its own for later ones. With a host tier, points are spilled there ahead of need, and a request that can go on from
one of them waits in its slot until the pages have arrived (`admission`).

Steps may overlap: `schedule` may be called again before the previous step's `commit`, unless states are kept in one
slot. A stop, cancellation or preemption then takes effect one step late, and no page is freed while a step in flight
may read it.

With `draft_tokens`, a step may verify up to so many drafted tokens of each decoding sequence: `schedule` is given them,
and `commit` says how many tokens each sequence has gained; the manager takes back the rest. Where the next step starts
is known only when this one has landed. A step that overlaps with it (`may_go_ahead`) is given room for all that may be
accepted, and the device finds out where it starts; once the first has landed, the books know too. A recurrent state
exists before and behind a step only, so where a draft was not accepted, a sequence with states goes back to the state
before the step and computes its accepted tokens once more, with the next ones.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.layout import rollback_for
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import CacheStats, Hit, RestorePoints
from windowpane.kv.speeds import Speeds
from windowpane.kv.tier import HostTier
from windowpane.schedule.adapters import AdapterSlots
from windowpane.schedule.admission import Admission
from windowpane.schedule.batch import Batch, PromptChunk
from windowpane.schedule.pace import Pace
from windowpane.schedule.request import NO_TOKENS, FinishReason, Request, Tokens
from windowpane.schedule.restoring import NoRestorePlanner, RestorePlanner
from windowpane.schedule.verifying import StepInFlight, Verifying, reason_to_end

DEFAULT_GROWTH_TOKENS = 256
MAX_STEPS_IN_FLIGHT = 2
MAX_PREEMPTIONS = 2  # after these a request is readmitted with its whole life reserved
PATIENCE = 16  # admissions that may overtake a request which does not fit; then they wait for it
LOOKAHEAD = 32  # waiting requests that one step looks at
PRIORITY_WORTH = 1024  # one step of priority is worth so many places in the queue, so nobody waits for ever
STOP_IDS = 4  # stop tokens checked for all requests at once; further ones are checked one by one
NO_TOKEN = -1


class RequestTooLong(ValueError):
    """The request can never fit; the message has the numbers."""


class BeyondModelLen(RequestTooLong):
    """Prompt and answer together are longer than `max_model_len`."""


@dataclass(frozen=True, slots=True)
class _Leaving:
    """How a sequence goes when its last step lands: back to the queue, and leaving a restore point."""

    requeue: bool
    keep: bool


class Scheduler:
    """Decides what each step computes. Knows no device: the manager's books are its only memory."""

    def __init__(
        self,
        manager: KVManager,
        max_num_batched_tokens: int,
        growth_tokens: int = DEFAULT_GROWTH_TOKENS,
        restore_points: RestorePoints | None = None,
        pace: Pace | None = None,
        draft_tokens: int = 0,
        tier: HostTier | None = None,
        adapter_slots: AdapterSlots | None = None,
    ) -> None:
        if max_num_batched_tokens < manager.num_slots * (1 + draft_tokens):
            drafts = f" × {1 + draft_tokens} (with {draft_tokens} drafts each)" if draft_tokens else ""
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs "
                f"({manager.num_slots}){drafts}: every running sequence needs its tokens in a step"
            )
        if draft_tokens and manager.rollback_tokens < rollback_for(draft_tokens, manager.layout):
            raise ValueError(
                f"{draft_tokens} drafts need a manager with rollback_tokens of at least "
                f"{rollback_for(draft_tokens, manager.layout)}, not {manager.rollback_tokens}: those that "
                "are not accepted are taken back"
            )
        if draft_tokens and manager.state_slots == 1:
            raise ValueError("drafts that are not accepted need the state before them: keep states in two slots")
        slots = manager.num_slots
        self.manager = manager
        self.most_in_flight = 1 if manager.state_slots == 1 else MAX_STEPS_IN_FLIGHT
        self.max_num_batched_tokens = max_num_batched_tokens
        self.growth_tokens = growth_tokens
        self.draft_tokens = draft_tokens
        self.restoring = RestorePlanner(restore_points, tier) if restore_points else NoRestorePlanner(manager)
        self.tier = tier
        self.speeds = Speeds() if tier is None else tier.speeds
        self._admission = Admission(manager, self.restoring, tier)
        self.adapters = adapter_slots  # None: no request has one
        self._adapter_of = np.zeros(slots, dtype=np.int32)  # the slot of each sequence's adapter
        self.pace = pace  # None: prompts take the whole budget, whoever decodes
        self.waiting: list[Request] = []  # sorted by _order
        self.running: dict[int, Request] = {}  # by slot
        self.preemptions = 0
        self._step = 0
        self._arrivals = 0
        self._free_slots = list(range(slots - 1, -1, -1))
        self._slot_of: dict[Request, int] = {}
        self._prefilling: dict[int, None] = {}  # slots, in order of admission
        self._decoding: dict[int, None] = {}
        self._decoding_slots: NDArray[np.int64] | None = None  # the same as an array, None when out of date
        # From this length on, a sequence's next step may go beyond what the manager has given it.
        self._horizon = np.zeros(slots, dtype=np.int64)
        self._verifying = Verifying(manager, self.running)
        self._last_length = np.zeros(slots, dtype=np.int64)  # a sequence's length when its last token is sampled
        self._stop_ids = np.full((slots, STOP_IDS), NO_TOKEN, dtype=np.int64)
        self._in_flight = np.zeros(slots, dtype=np.int64)  # steps in flight that hold the slot
        self._leaving: dict[int, _Leaving] = {}  # slots that go when their last step lands
        self._many_stops: set[Request] = set()  # running requests with more stop tokens than the array holds
        self._unlanded: deque[StepInFlight] = deque()  # oldest first
        self._unsettled: tuple[int, ...] = ()  # of the step being put together: see `Batch`
        self._nothing_fits = False  # the last look at the queue found nothing, and nothing has changed since
        self._short_of_memory = False  # a renewal preempted or waits in this step: nobody new is let in

    # -- requests come and go --------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. One that can never fit is refused at once."""
        self.check(request)
        self.queue(request)

    def queue(self, request: Request) -> None:
        """Queue a request that has passed `check`."""
        request.arrival = self._arrivals
        self._arrivals += 1
        insort(self.waiting, request, key=_order)
        self._nothing_fits = False

    def check(self, request: Request) -> None:
        """Raise RequestTooLong for one that can never fit. Reads only what never changes: any thread may ask."""
        if request.params.max_tokens > self.room(len(request.prompt)):
            raise BeyondModelLen(
                f"request {request.id}: {len(request.prompt)} prompt tokens + {request.params.max_tokens} new ones "
                f"exceed max_model_len {self.manager.max_model_len}"
            )
        if not self.manager.could_ever_hold(request.longest_kv):
            need = self.manager.demand(request.longest_kv)
            need_bytes = sum(n * g.page_bytes for n, g in zip(need, self.manager.layout.groups, strict=True))
            raise RequestTooLong(
                f"request {request.id}: {request.longest_kv} tokens need {need_bytes:,} bytes of KV and the arena has "
                f"{self.manager.arena.total_bytes:,}; shorten the prompt or max_tokens"
            )

    def room(self, prompt_tokens: int) -> int:
        """New tokens that fit behind a prompt of so many: the last one sampled is never computed."""
        return self.manager.max_model_len + 1 - prompt_tokens

    def cancel(self, request: Request, *, keep: bool = True) -> None:
        """End a request at any moment. Its bytes are free at once, or when the step that reads them lands.

        `keep` False: what it holds cannot be trusted, so it leaves no restore point.
        """
        if request.finish_reason is not None:
            return
        request.finish_reason = FinishReason.CANCELLED
        slot = self._slot_of.get(request)
        if slot is None:
            self.waiting.remove(request)
            self._nothing_fits = False
        else:
            self._leave(slot, requeue=False, keep=keep)

    def drop_output(self, request: Request, count: int) -> None:
        """An answer has ended with its first so many tokens. Others were computed, and what they left can be kept."""
        if request in self._slot_of:
            for token in request.output[count:]:
                self.restoring.hear(request, token)
        del request.output[count:]

    def forget_restore_points(self) -> None:
        """A step failed: nothing that was kept on the device can be trusted, nor what was on its way."""
        for slot in self._admission.fetching:
            self._leave(slot, requeue=True, keep=False)
        self.restoring.clear()
        if self.adapters is not None:
            self.adapters.place_again()

    def drop_restore_points(self) -> int:
        """Give up what is only cached, and say how many points that were; those still being written stay."""
        dropped = [point for point in self.manager.restore_points if not point.pending]
        for point in dropped:
            self.manager.drop(point)
        return len(dropped) + (self.tier.drop_points() if self.tier is not None else 0)

    @property
    def cache_stats(self) -> CacheStats:
        return self.restoring.stats

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run, or pages are to be copied between tiers."""
        return bool(self.waiting or self.running) or (self.tier is not None and self.tier.is_busy)

    @property
    def only_decodes(self) -> bool:
        """Whether sequences decode and nothing else is under way: none waits, fills or leaves, nothing is in flight."""
        copies = self.tier is not None and self.tier.is_busy
        return bool(self._decoding) and not (
            copies or self.waiting or self._prefilling or self._leaving or self._unlanded
        )

    @property
    def decoding_slots(self) -> NDArray[np.int64]:
        return self._decoding_array()

    @property
    def steps_in_flight(self) -> int:
        return len(self._unlanded)

    # -- one step --------------------------------------------------------------------------------------------------

    def draft_room(self, slot: int) -> int:
        """How many drafts the next step can verify for a sequence; 0 for one that does not decode."""
        if slot not in self._decoding:
            return 0
        return self._verifying.room(slot, self.draft_tokens, int(self._last_length[slot]))

    def land(self, landed: Iterable[tuple[int, float]]) -> None:
        """These transfers between tiers are over, and took so many seconds each."""
        for slot in self._admission.land(landed):
            self._prefilling[slot] = None
        self._nothing_fits = False

    @property
    def may_go_ahead(self) -> bool:
        """Whether the next step can be prepared while one with drafts is in flight.

        Prompts wait until that step has landed, as do sequences whose answers may end with it.
        """
        if len(self._unlanded) != 1 or not self._unlanded[0].verifying or self.manager.has_state:
            return False
        may_admit = self.waiting and self._free_slots and not self._nothing_fits
        if self._prefilling or may_admit or (self.tier is not None and self.tier.is_busy):
            return False
        slots = self._decoding_array()
        return bool((self.manager.lengths[slots] < self._last_length[slots]).any())

    def schedule(self, drafts: Mapping[int, Tokens] | None = None) -> Batch | None:
        """The next step, or None when there is nothing to compute now.

        `drafts` are tokens by slot, no more than `draft_room` each; as many of them are verified as the sequence's
        reservation has room for.
        """
        if len(self._unlanded) >= self.most_in_flight:
            raise RuntimeError(f"{len(self._unlanded)} steps are in flight: commit one first")
        self._unsettled = tuple(self._unlanded[0].verifying) if (is_ahead := self.may_go_ahead) else ()
        if self._unlanded and (drafts or self._unlanded[-1].verifying) and not is_ahead:
            raise RuntimeError("a step in flight hides where the next one starts: commit it first")
        if self.tier is not None and self.tier.take_from_disk():
            self._nothing_fits = False
        decoding, verifying = self._decode(drafts or {})
        budget = self.max_num_batched_tokens - len(decoding) - sum(len(c.tokens) for c in verifying)
        if self.pace is not None and (len(decoding) or verifying):
            budget = min(budget, self.pace.tokens())
        chunks = verifying if is_ahead else verifying + self._prefill(budget)
        manager = self.manager
        if self.tier is not None:
            self.tier.spill_ahead()
        if not len(decoding) and not chunks and not manager.books.log.has_transfers:
            return None
        slots = np.concatenate([decoding, np.array([c.slot for c in chunks], dtype=np.int64)]) if chunks else decoding
        state_slots = manager.state_slot[slots]
        computed = [c.slot for c in chunks if len(c.tokens)]
        manager.flip_states(np.concatenate([decoding, np.array(computed, dtype=np.int64)]) if chunks else decoding)
        self._take_off(slots, decoding, chunks)
        self._step += 1
        changes = manager.take_changes()
        written, shared = self.restoring.close_step()
        self._unlanded[-1].points.extend(written)
        for slot in shared:
            if slot in self._decoding:  # what a point keeps must not be overwritten
                self._set_horizon(slot)
        return Batch(
            step=self._step,
            decode_slots=decoding,
            decode_positions=manager.lengths[decoding] - 1,
            chunks=chunks,
            state_slots=state_slots,
            changes=changes,
            unsettled=self._unsettled,
            **self._adapters_in(slots),
        )

    def _adapters_in(self, slots: NDArray[np.int64]) -> dict[str, Any]:
        """What a step has to know of its sequences' adapters."""
        if self.adapters is None:
            return {}
        found = self._adapter_of[slots]
        return {"adapters": found if found.any() else found[:0], "placed_adapters": self.adapters.take_placed()}

    def commit(
        self, tokens: Sequence[int] | NDArray[np.int64], counts: Sequence[int] | NDArray[np.int64] | None = None
    ) -> list[Request]:
        """Take in the tokens that the oldest step in flight sampled; returns the requests that are finished now.

        Each sequence that samples has one token, or, in a step with drafts, as many as `counts` says: 1 and one more
        for each draft that was accepted, one sequence's tokens after another's.
        """
        step = self._unlanded.popleft()
        sampled = np.asarray(tokens, dtype=np.int64)
        expected = len(step.sampling) if counts is None else int(np.sum(counts))
        if len(sampled) != expected:
            raise ValueError(f"step {step.step} samples {expected} tokens, got {len(sampled)}")
        self._in_flight[step.slots] -= 1
        for point in step.points:
            self.manager.publish(point)
        if counts is not None and not step.verifying:
            raise ValueError(f"counts are for steps with drafts, and step {step.step} has none")
        if step.verifying:
            counts = [1] * expected if counts is None else counts
            for slot in self._verifying.take_accepted(step, sampled, counts, self.restoring.hear, self._in_flight):
                self._set_horizon(slot)
            finished = [request for request in step.sampling if self._end_if_complete(request)]
        else:
            finished = self._take_one_each(step, sampled)
        for slot in [slot for slot in self._leaving if self._in_flight[slot] == 0]:
            self._depart(slot)
        if not self.running and (self.tier is None or not self.tier.in_transit):
            self.manager.check_idle()
        return finished

    # -- decoding: all at once -------------------------------------------------------------------------------------

    def _decode(self, drafts: Mapping[int, Tokens]) -> tuple[NDArray[np.int64], list[PromptChunk]]:
        """Advance every decoding sequence by one token, or by its drafts too.

        Returns the slots of those that compute one token, and chunks of those that compute several.
        """
        self._short_of_memory = False
        slots, manager = self._decoding_array(), self.manager
        at_horizon = manager.lengths[slots] >= self._horizon[slots]
        several = self._verifying.behind.union(drafts) if drafts or self._verifying.behind else set()
        if several:
            at_horizon |= np.array([slot in several for slot in slots.tolist()], dtype=bool)
        elif not at_horizon.any():
            manager.advance(slots)
            return slots, []
        starts = {slot: int(manager.lengths[slot]) for slot in several}
        # First in line first: a preemption takes the last in line, so never one that has already grown here.
        due = sorted(slots[at_horizon].tolist(), key=lambda slot: _order(self.running[slot]))
        grown = {slot for slot in due if self._grow(slot, drafts.get(slot, NO_TOKENS))}
        if not several and len(grown) == len(due) and self._decoding_slots is slots:
            manager.advance(slots[~at_horizon])  # as a rule: nobody waits or was sent back
            return slots, []
        steady = [slot for slot in slots[~at_horizon].tolist() if slot in self._decoding]
        manager.advance(np.array(steady, dtype=np.int64))
        # In the order they had: what samplers prepare for a set of rows then serves the next step too.
        grown.update(steady)
        going = [slot for slot in slots.tolist() if slot in grown]
        chunks = {
            slot: self._verifying.chunk(slot, starts[slot], drafts.get(slot, NO_TOKENS))
            for slot in going
            if slot in several
        }
        single = [slot for slot in going if slot not in chunks or len(chunks[slot].tokens) == 1]
        return np.array(single, dtype=np.int64), [c for c in chunks.values() if len(c.tokens) > 1]

    def _decoding_array(self) -> NDArray[np.int64]:
        if self._decoding_slots is None:
            self._decoding_slots = np.fromiter(self._decoding, dtype=np.int64, count=len(self._decoding))
        return self._decoding_slots

    def _grow(self, slot: int, drafts: Tokens) -> bool:
        """One more token, and drafts as far as its reservation goes, for a sequence at its horizon or with drafts.

        One whose state is behind gets all that is known. False: it is or may be at its end, or has to wait for memory.
        """
        manager = self.manager
        if slot not in self._decoding:
            return False  # preempted by one before it
        length = int(manager.lengths[slot]) + 1
        if slot in self._verifying.behind:
            length = self.running[slot].known_tokens
        if length > self._last_length[slot]:
            if slot not in self._unsettled:
                self._stop_decoding(slot)  # all its tokens are on their way
            return False
        if length + len(drafts) <= self._horizon[slot] and not manager.has_state:
            manager.advance(slot, 1 + len(drafts))
            return True
        if length > manager.reserved_tokens[slot] and not self._renew(slot):
            return False
        manager.extend(slot, length + min(len(drafts), manager.reserved_tokens[slot] - length))
        self._set_horizon(slot)
        return True

    def _renew(self, slot: int) -> bool:
        """Reserve the next tokens, preempting the last in line if need be. False: not in this step."""
        manager = self.manager
        tokens = self._next_reservation(slot)
        demand = manager.renew_demand(slot, tokens)
        while not manager.can_reserve(demand):
            if self.manager.give_way(demand):
                break
            self._short_of_memory = True
            if self._leaving or (self.tier is not None and self.tier.is_spilling):
                return False  # bytes are on their way back: wait for them before anyone else has to go
            victim = max(self._preemptible(), key=lambda s: _order(self.running[s]))
            self._preempt(victim)
            if victim == slot:
                return False
        manager.renew(slot, tokens)
        return True

    def _next_reservation(self, slot: int) -> int:
        """Tokens that a renewal reserves."""
        return min(self.manager.reserved_tokens[slot] + self.growth_tokens, int(self._last_length[slot]))

    def _preemptible(self) -> list[int]:
        """Sequences that may be sent back: not those that were promised their whole life, nor those already in this
        step.

        The one that asks is always among them, so there is always one.
        """
        return [
            slot
            for slot, request in self.running.items()
            if request.preemptions < MAX_PREEMPTIONS and slot not in self._leaving
        ]

    # -- prefilling and admission ----------------------------------------------------------------------------------

    def _prefill(self, budget: int) -> list[PromptChunk]:
        """Fill the budget with chunks of admitted prompts, then with newly admitted ones."""
        chunks: list[PromptChunk] = []
        for slot in list(self._prefilling):
            if budget <= 0:
                return chunks
            chunks.append(self._chunk(slot, budget))
            budget -= len(chunks[-1].tokens)
        while budget > 0 and (admitted := self._admit()) is not None:
            if admitted in self._prefilling:  # else it waits for pages from the host
                chunks.append(self._chunk(admitted, budget))
                budget -= len(chunks[-1].tokens)
        return chunks

    def _chunk(self, slot: int, budget: int) -> PromptChunk:
        request, restoring = self.running[slot], self.restoring
        start = int(self.manager.lengths[slot])
        stop = min(request.known_tokens, start + budget)
        restoring.extend(slot, request, stop)
        at_prompt_end = start < stop == len(request.prompt) == request.known_tokens
        keep_hidden = restoring.end_chunk(slot, request, stop, at_prompt_end=at_prompt_end)
        hidden = restoring.take_hidden(slot)
        done = stop == request.known_tokens
        if done:
            del self._prefilling[slot]
            self._start_decoding(slot)
            restoring.end_prompt(slot)
        return PromptChunk(slot, start, request.tokens(start, stop), done, keep_hidden, hidden)

    def _admit(self) -> int | None:
        """Admit the first waiting request that fits, unless one that was overtaken too often waits before it."""
        if self._nothing_fits or self._short_of_memory or not self._free_slots:
            return None
        for index, request in enumerate(self.waiting[:LOOKAHEAD]):
            tokens = self._first_reservation(request)
            has_adapter = self.adapters is None or self.adapters.fits(request.adapter)
            hit = self._admission.fit(request, tokens) if has_adapter else None
            if hit is not None:
                for overtaken in self.waiting[:index]:
                    overtaken.bypassed += 1
                del self.waiting[index]
                return self._start(request, tokens, hit)
            if request.bypassed >= PATIENCE:
                break
        self._nothing_fits = True
        return None

    def _first_reservation(self, request: Request) -> int:
        """Tokens to reserve at admission: the prompt and some growth, more after a preemption, in the end all."""
        if request.preemptions >= MAX_PREEMPTIONS:
            return request.longest_kv
        growth: int = self.growth_tokens * 4**request.preemptions
        return min(request.known_tokens + growth, request.longest_kv)

    def _start(self, request: Request, tokens: int, hit: Hit) -> int:
        slot: int = self._free_slots.pop()
        if self._admission.start(slot, request, tokens, hit):
            self._prefilling[slot] = None
        if self.adapters is not None:
            self._adapter_of[slot] = self.adapters.take(request.adapter)
        self.running[slot] = request
        self._slot_of[request] = slot
        self._last_length[slot] = request.longest_kv
        stop_ids = request.params.stop_token_ids[:STOP_IDS]
        self._stop_ids[slot] = NO_TOKEN
        self._stop_ids[slot, : len(stop_ids)] = stop_ids
        if len(request.params.stop_token_ids) > STOP_IDS:
            self._many_stops.add(request)
        return slot

    # -- in flight and landing -------------------------------------------------------------------------------------

    def _take_off(self, slots: NDArray[np.int64], decoding: NDArray[np.int64], chunks: list[PromptChunk]) -> None:
        self._in_flight[slots] += 1
        sampling_slots = decoding
        new = [c.slot for c in chunks if c.samples]
        if new:
            sampling_slots = np.concatenate([decoding, np.array(new, dtype=np.int64)])
        sampling = [self.running[slot] for slot in sampling_slots.tolist()]
        last = self.manager.lengths[sampling_slots] >= self._last_length[sampling_slots]
        verifying = {c.slot: c for c in chunks if c.drafts}
        self._unlanded.append(StepInFlight(self._step + 1, slots, sampling_slots, sampling, last, verifying))

    def _take_one_each(self, step: StepInFlight, sampled: NDArray[np.int64]) -> list[Request]:
        """Take in one token of each request; those that a stop token or their length has ended leave their slots."""
        for request, token in zip(step.sampling, sampled.tolist(), strict=True):
            if request.finish_reason is None:
                request.output.append(token)
            else:
                self.restoring.hear(request, token)
        may_end = (self._stop_ids[step.sampling_slots] == sampled[:, None]).any(axis=1) | step.last
        rows = np.flatnonzero(may_end).tolist()
        if self._many_stops:
            rows += [row for row, request in enumerate(step.sampling) if request in self._many_stops]
        return [step.sampling[row] for row in rows if self._end_if_complete(step.sampling[row])]

    def _end_if_complete(self, request: Request) -> bool:
        """End a request whose last token is a stop token or the last that it may have: it leaves its slot."""
        reason = None if request.finish_reason is not None else reason_to_end(request)
        if reason is None:
            return False
        request.finish_reason = reason
        self._leave(self._slot_of[request], requeue=False)
        return True

    # -- leaving ---------------------------------------------------------------------------------------------------

    def _preempt(self, slot: int) -> None:
        self.preemptions += 1
        self.running[slot].preemptions += 1
        self._leave(slot, requeue=True)

    def _leave(self, slot: int, *, requeue: bool, keep: bool = True) -> None:
        """Take a sequence out of the steps to come, and give its pages back once no step in flight reads them."""
        self._prefilling.pop(slot, None)
        self._stop_decoding(slot)
        self._leaving[slot] = _Leaving(requeue, keep)
        if self._in_flight[slot] == 0:
            self._depart(slot)

    def _depart(self, slot: int) -> None:
        leaving = self._leaving.pop(slot)
        request = self.running.pop(slot)
        if leaving.keep:
            self.restoring.release(slot, request, swap=leaving.requeue)
        else:
            self.manager.release(slot)
        self.restoring.forget(slot, request)
        self._admission.forget(slot)
        if self.adapters is not None:
            self.adapters.give_back(request.adapter)
        del self._slot_of[request]
        self._verifying.behind.discard(slot)
        self._many_stops.discard(request)
        self._free_slots.append(slot)
        self._nothing_fits = False
        if leaving.requeue and request.finish_reason is None:
            request.bypassed = 0
            insort(self.waiting, request, key=_order)

    def _start_decoding(self, slot: int) -> None:
        self._decoding[slot] = None
        self._decoding_slots = None
        self._set_horizon(slot)

    def _set_horizon(self, slot: int) -> None:
        self._horizon[slot] = min(self.manager.horizon(slot), int(self._last_length[slot]))

    def _stop_decoding(self, slot: int) -> None:
        if slot in self._decoding:
            del self._decoding[slot]
            self._decoding_slots = None


def _order(request: Request) -> int:
    """Place in the queue: first come, first served, shifted by priority."""
    return request.priority * PRIORITY_WORTH + request.arrival
