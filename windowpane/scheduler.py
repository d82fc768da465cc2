"""The scheduler: every request has tokens known and tokens computed; each step closes the gap under a token budget.

    add ─► waiting ─► running: prefilling ─► decoding ─► finished
              ▲                    │             │
              └──── preempted ◄────┴─────────────┘        (only a renewal preempts)

A request is admitted when its whole prompt and the next `growth_tokens` can be reserved, so that once it runs it never
waits for memory until that is used up. Decoding requests live in arrays and are advanced together; Python looks at one
of them only when it reaches its *horizon*: a page boundary, the end of its reservation or of its life.

With restore points, an admitted request begins where an earlier one left what it shares with it, and leaves its own for
later ones. They are entered when a step is scheduled, so that the step writes them, and can be resumed from once it has
landed.

Steps may overlap: `schedule` may be called again before the previous step's `commit`. A stop, cancellation or
preemption then takes effect one step late, and no page is freed while a step in flight may read it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from windowpane.kv.changes import Changes
from windowpane.kv.manager import KVManager, Retained
from windowpane.kv.restore import CacheStats, Hit, RestorePoints, prompt_marks
from windowpane.kv.retention import MIN_PREFIX_TOKENS
from windowpane.pace import Pace
from windowpane.request import FinishReason, Request, Tokens

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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of one sequence in one step. `samples`: the last of them yields the first (or next) token.

    `keep_hidden` is the row in which to keep the final hidden state of the last one. A chunk of a prompt that is known
    to its end has no tokens: `hidden` is the row that has this state.
    """

    slot: int
    start: int
    tokens: Tokens
    samples: bool
    keep_hidden: int | None = None
    hidden: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, as plain values. Decoding rows come first: each computes the token its slot sampled last.

    The step samples one token for every decoding row and every chunk that `samples`, in that order. `state_slots` names
    the present one of the two states of each row and chunk.
    """

    step: int
    decode_slots: NDArray[np.int64]
    decode_positions: NDArray[np.int64]
    chunks: list[Chunk]
    state_slots: NDArray[np.int8]
    changes: Changes

    @property
    def sampling_slots(self) -> NDArray[np.int64]:
        """Who samples a token in this step, in order."""
        chunks = [c.slot for c in self.chunks if c.samples]
        return np.concatenate([self.decode_slots, np.array(chunks, dtype=np.int64)])

    @property
    def prompt_tokens(self) -> int:
        return sum(len(c.tokens) for c in self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) + self.prompt_tokens


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step whose tokens are not known yet."""

    step: int
    slots: NDArray[np.int64]  # all sequences in it
    sampling_slots: NDArray[np.int64]
    sampling: list[Request]
    last: NDArray[np.bool_]  # rows that sample the last token of a request's life
    points: list[Retained] = field(default_factory=list)  # restore points that it writes


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
        restore: RestorePoints | None = None,
        pace: Pace | None = None,
    ) -> None:
        if max_num_batched_tokens < manager.num_slots:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs "
                f"({manager.num_slots}): every running sequence needs one token a step"
            )
        slots = manager.num_slots
        self.manager = manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.growth_tokens = growth_tokens
        self.restore = restore  # None: nothing is kept
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
        self._horizon = np.zeros(slots, dtype=np.int64)
        self._last_length = np.zeros(slots, dtype=np.int64)  # a sequence's length when its last token is sampled
        self._stop_ids = np.full((slots, STOP_IDS), NO_TOKEN, dtype=np.int64)
        self._in_flight = np.zeros(slots, dtype=np.int64)  # steps in flight that hold the slot
        self._leaving: dict[int, _Leaving] = {}  # slots that go when their last step lands
        self._many_stops: set[Request] = set()  # running requests with more stop tokens than the array holds
        self._flights: deque[_Flight] = deque()
        self._marks: dict[int, list[int]] = {}  # by slot: where in its prompt restore points are wanted
        self._last_point: dict[int, int] = {}  # by slot: the last place in its prompt that has one
        self._restored: dict[int, int] = {}  # by slot: the row with the hidden state of a prompt known to its end
        self._points: list[Retained] = []  # restore points that the step being put together writes
        self._at_chunk_end: list[Chunk] = []  # chunks of that step that end where one is wanted
        self._unheard: dict[Request, list[int]] = {}  # tokens sampled after a request had ended
        self._nothing_fits = False  # the last look at the queue found nothing, and nothing has changed since
        self._short_of_memory = False  # a renewal preempted or waits in this step: nobody new is let in

    # -- requests come and go --------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. One that can never fit is refused at once."""
        self.check(request)
        request.arrival = self._arrivals
        self._arrivals += 1
        insort(self.waiting, request, key=_order)
        self._nothing_fits = False

    def check(self, request: Request) -> None:
        """Raise RequestTooLong for one that can never fit. Reads only what never changes: any thread may ask."""
        limit = self.manager.max_model_len
        if len(request.prompt) + request.params.max_tokens > limit + 1:
            raise RequestTooLong(
                f"request {request.id}: {len(request.prompt)} prompt tokens + {request.params.max_tokens} new ones "
                f"exceed max_model_len {limit}"
            )
        if not self.manager.could_ever_hold(request.longest_kv):
            need = self.manager.demand(request.longest_kv)
            need_bytes = sum(n * g.page_bytes for n, g in zip(need, self.manager.layout.groups, strict=True))
            raise RequestTooLong(
                f"request {request.id}: {request.longest_kv} tokens need {need_bytes:,} bytes of KV and the arena has "
                f"{self.manager.arena.total_bytes:,}; shorten the prompt or max_tokens"
            )

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

    def forget_restore_points(self) -> None:
        """A step failed: nothing that was kept can be trusted."""
        if self.restore is not None:
            self.restore.clear()

    @property
    def cache_stats(self) -> CacheStats:
        return CacheStats() if self.restore is None else self.restore.stats

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def steps_in_flight(self) -> int:
        return len(self._flights)

    # -- one step --------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next step, or None when there is nothing to compute now."""
        if len(self._flights) >= MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(f"{MAX_STEPS_IN_FLIGHT} steps are in flight: commit one first")
        decoding = self._decode()
        budget = self.max_num_batched_tokens - len(decoding)
        if self.pace is not None and len(decoding):
            budget = min(budget, self.pace.tokens())
        chunks = self._prefill(budget)
        if not len(decoding) and not chunks:
            return None
        manager = self.manager
        slots = np.concatenate([decoding, np.array([c.slot for c in chunks], dtype=np.int64)]) if chunks else decoding
        state_slots = manager.state_slot[slots]
        computed = [c.slot for c in chunks if len(c.tokens)]
        manager.flip_states(np.concatenate([decoding, np.array(computed, dtype=np.int64)]) if chunks else decoding)
        self._take_off(slots, decoding, chunks)
        self._step += 1
        changes = manager.take_changes()
        if self.restore is not None:
            self._keep_chunk_ends(self.restore)
        return Batch(
            step=self._step,
            decode_slots=decoding,
            decode_positions=manager.lengths[decoding] - 1,
            chunks=chunks,
            state_slots=state_slots,
            changes=changes,
        )

    def commit(self, tokens: Sequence[int] | NDArray[np.int64]) -> list[Request]:
        """Take in the tokens that the oldest step in flight sampled; returns the requests that are finished now."""
        flight = self._flights.popleft()
        sampled = np.asarray(tokens, dtype=np.int64)
        if len(sampled) != len(flight.sampling):
            raise ValueError(f"step {flight.step} samples {len(flight.sampling)} tokens, got {len(sampled)}")
        self._in_flight[flight.slots] -= 1
        for request, token in zip(flight.sampling, sampled.tolist(), strict=True):
            if request.finish_reason is None:
                request.output.append(token)
            elif self.restore is not None:
                self._unheard.setdefault(request, []).append(token)
        for kept in flight.points:
            self.manager.publish(kept)
        finished = self._finish(flight, sampled)
        for slot in [slot for slot in self._leaving if self._in_flight[slot] == 0]:
            self._depart(slot)
        if not self.running:
            self.manager.check_idle()
        return finished

    # -- decoding: all at once -------------------------------------------------------------------------------------

    def _decode(self) -> NDArray[np.int64]:
        """Advance every decoding sequence by one token; returns their slots."""
        self._short_of_memory = False
        slots = self._decoding_array()
        at_horizon = self.manager.lengths[slots] >= self._horizon[slots]
        if not at_horizon.any():
            self.manager.advance(slots)
            return slots
        # First in line first: a preemption takes the last in line, so never one that has already grown here.
        due = sorted(slots[at_horizon].tolist(), key=lambda slot: _order(self.running[slot]))
        grown = {slot for slot in due if self._grow(slot)}
        steady = [slot for slot in slots[~at_horizon].tolist() if slot in self._decoding]
        self.manager.advance(np.array(steady, dtype=np.int64))
        # In the order they had: what samplers prepare for a set of rows then serves the next step too.
        going = grown.union(steady)
        return np.array([slot for slot in slots.tolist() if slot in going], dtype=np.int64)

    def _decoding_array(self) -> NDArray[np.int64]:
        if self._decoding_slots is None:
            self._decoding_slots = np.fromiter(self._decoding, dtype=np.int64, count=len(self._decoding))
        return self._decoding_slots

    def _grow(self, slot: int) -> bool:
        """One more token for a sequence at its horizon: False when it is at its end or has to wait for memory."""
        manager = self.manager
        if slot not in self._decoding:
            return False  # preempted by one before it
        length = int(manager.lengths[slot]) + 1
        if length > self._last_length[slot]:
            self._stop_decoding(slot)  # all its tokens are on their way
            return False
        if length > manager.reserved_tokens[slot] and not self._renew(slot):
            return False
        manager.extend(slot, length)
        self._set_horizon(slot)
        return True

    def _renew(self, slot: int) -> bool:
        """Reserve the next tokens, preempting the last in line if need be. False: not in this step."""
        manager = self.manager
        tokens = min(manager.reserved_tokens[slot] + self.growth_tokens, int(self._last_length[slot]))
        demand = manager.renew_demand(slot, tokens)
        while not manager.can_reserve(demand):
            if self.manager.give_way(demand):
                break
            self._short_of_memory = True
            if self._leaving:
                return False  # bytes are on their way back: wait for them before anyone else has to go
            victim = max(self._preemptible(), key=lambda s: _order(self.running[s]))
            self._preempt(victim)
            if victim == slot:
                return False
        manager.renew(slot, tokens)
        return True

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

    def _prefill(self, budget: int) -> list[Chunk]:
        """Fill the budget with chunks of admitted prompts, then with newly admitted ones."""
        chunks: list[Chunk] = []
        for slot in list(self._prefilling):
            if budget <= 0:
                return chunks
            chunks.append(self._chunk(slot, budget))
            budget -= len(chunks[-1].tokens)
        while budget > 0 and (admitted := self._admit()) is not None:
            chunks.append(self._chunk(admitted, budget))
            budget -= len(chunks[-1].tokens)
        return chunks

    def _chunk(self, slot: int, budget: int) -> Chunk:
        request = self.running[slot]
        start = int(self.manager.lengths[slot])
        stop = min(request.known_tokens, start + budget)
        marks = [mark for mark in self._marks.get(slot, ()) if mark > start]
        if marks and self.manager.has_state:
            stop = min(stop, marks[0])
        done = stop == request.known_tokens
        at_prompt_end = done and stop == len(request.prompt) and stop > start
        self._extend(slot, stop, [mark for mark in marks if mark < stop])
        chunk = Chunk(
            slot,
            start,
            request.tokens(start, stop),
            samples=done,
            keep_hidden=self.restore.take_hidden() if self.restore is not None and at_prompt_end else None,
            hidden=self._restored.pop(slot, None),
        )
        if self.restore is not None and (at_prompt_end or stop in marks):
            self._at_chunk_end.append(chunk)
        if done:
            del self._prefilling[slot]
            self._marks.pop(slot, None)
            self._start_decoding(slot)
        return chunk

    def _admit(self) -> int | None:
        """Admit the first waiting request that fits, unless one that was overtaken too often waits before it."""
        if self._nothing_fits or self._short_of_memory or not self._free_slots:
            return None
        for index, request in enumerate(self.waiting[:LOOKAHEAD]):
            tokens = self._first_reservation(request)
            hit = self._fit(request, tokens)
            if hit is not None:
                for overtaken in self.waiting[:index]:
                    overtaken.bypassed += 1
                del self.waiting[index]
                return self._start(request, tokens, hit)
            if request.bypassed >= PATIENCE:
                break
        self._nothing_fits = True
        return None

    def _fit(self, request: Request, tokens: int) -> Hit | None:
        """How a request can be admitted: from the start, or from what is known of it; None: not now.

        Who resumes pins the window's pages beside its own, so where memory is short it may have to begin afresh.
        """
        manager = self.manager
        hit = self._look_up(request)
        if hit.kept is not None:
            demand = manager.start_demand(tokens, hit.kept, hit.length)
            if manager.can_reserve(demand):
                return hit
            manager.give_way(demand)
            if hit.kept in manager.books.retained and manager.can_reserve(
                manager.start_demand(tokens, hit.kept, hit.length)
            ):
                return hit
            hit = Hit(branch=hit.branch, miss=f"{hit.length} tokens are kept, but there is no room to resume them")
        demand = manager.start_demand(tokens)
        return hit if manager.can_reserve(demand) or manager.give_way(demand) else None

    def _look_up(self, request: Request) -> Hit:
        if self.restore is None:
            return Hit(miss="prefix caching is off")
        params = request.params
        if params.prompt_logprobs is not None and len(request.prompt_logprobs) < len(request.prompt):
            return Hit(miss="prompt_logprobs asks for every prompt token")
        known = request.tokens(0, request.known_tokens)
        return self.restore.look_up(request.cache_salt, known, may_skip_last=not request.output)

    def _first_reservation(self, request: Request) -> int:
        """The prompt and some growth. Who was sent back before is let in with more, at last with all it may need."""
        if request.preemptions >= MAX_PREEMPTIONS:
            return request.longest_kv
        growth: int = self.growth_tokens * 4**request.preemptions
        return min(request.known_tokens + growth, request.longest_kv)

    def _start(self, request: Request, tokens: int, hit: Hit) -> int:
        slot: int = self._free_slots.pop()
        if hit.kept is not None:
            self.manager.touch(hit.kept)
        self.manager.start(slot, tokens, hit.kept, hit.length if hit.kept is not None else None)
        if self.restore is not None:
            self._plan_restore_points(slot, request, hit, self.restore)
        self.running[slot] = request
        self._slot_of[request] = slot
        self._prefilling[slot] = None
        self._last_length[slot] = request.longest_kv
        stop_ids = request.params.stop_token_ids[:STOP_IDS]
        self._stop_ids[slot] = NO_TOKEN
        self._stop_ids[slot, : len(stop_ids)] = stop_ids
        if len(request.params.stop_token_ids) > STOP_IDS:
            self._many_stops.add(request)
        return slot

    # -- restore points --------------------------------------------------------------------------------------------

    def _plan_restore_points(self, slot: int, request: Request, hit: Hit, restore: RestorePoints) -> None:
        """Take note of what was found, and of where this prompt should leave restore points."""
        if request.preemptions == 0:
            request.cached_tokens, request.cache_miss = hit.length, hit.miss
            restore.count(len(request.prompt), hit.length)
        self._last_point[slot] = hit.length
        if hit.hidden is not None:
            self._restored[slot] = hit.hidden
        if self.manager.keeps_all(len(request.prompt)):
            return  # the point at the prompt's end will do for all places before it
        marks = prompt_marks(
            request.message_ends, hit.branch, hit.length, len(request.prompt), one_only=self.manager.has_state
        )
        if marks:
            self._marks[slot] = marks

    def _extend(self, slot: int, stop: int, marks: list[int]) -> None:
        """Give a chunk its pages, leaving restore points inside it where they are worth their room."""
        restore, request = self.restore, self.running[slot]
        if restore is None or not marks:
            self.manager.extend(slot, stop)
            return
        key, before, tails = request.cache_salt, self._last_point[slot], []
        for mark in marks:
            if restore.is_kept(key, request.prompt[:mark]):
                before = mark
            elif restore.is_worth_its_room(before, mark):
                tails.append(mark)
                before = mark
        self._last_point[slot] = before
        for kept in self.manager.extend_with_tails(slot, stop, tails):
            if restore.add(key, request.prompt[: kept.length], kept):
                self._points.append(kept)

    def _keep_chunk_ends(self, restore: RestorePoints) -> None:
        """Keep restore points where chunks of the step that was just put together end."""
        for chunk in self._at_chunk_end:
            slot, length = chunk.slot, chunk.start + len(chunk.tokens)
            request = self.running[slot]
            kept = self.manager.retain(slot) if restore.is_worth_its_room(self._last_point[slot], length) else None
            if kept is None:
                restore.give_back_hidden(chunk.keep_hidden)
            elif restore.add(request.cache_salt, request.prompt[:length], kept, chunk.keep_hidden):
                self._points.append(kept)
                self._last_point[slot] = length
            if slot in self._decoding:  # what is kept must not be overwritten
                self._set_horizon(slot)
        self._flights[-1].points.extend(self._points)
        self._at_chunk_end.clear()
        self._points.clear()

    def _release_and_keep(self, slot: int, request: Request, restore: RestorePoints) -> None:
        """A sequence leaves all that it computed as a restore point."""
        length = int(self.manager.lengths[slot])
        late = self._unheard.get(request, [])
        known = np.concatenate([request.tokens(0, request.known_tokens), np.array(late, dtype=np.int32)])
        if MIN_PREFIX_TOKENS <= length <= len(known) and not restore.is_kept(request.cache_salt, known[:length]):
            restore.add(request.cache_salt, known[:length], self.manager.release_and_keep(slot))
        else:
            self.manager.release(slot)

    # -- in flight and landing -------------------------------------------------------------------------------------

    def _take_off(self, slots: NDArray[np.int64], decoding: NDArray[np.int64], chunks: list[Chunk]) -> None:
        self._in_flight[slots] += 1
        sampling_slots = decoding
        new = [c.slot for c in chunks if c.samples]
        if new:
            sampling_slots = np.concatenate([decoding, np.array(new, dtype=np.int64)])
        sampling = [self.running[slot] for slot in sampling_slots.tolist()]
        last = self.manager.lengths[sampling_slots] >= self._last_length[sampling_slots]
        self._flights.append(_Flight(self._step + 1, slots, sampling_slots, sampling, last))

    def _finish(self, flight: _Flight, sampled: NDArray[np.int64]) -> list[Request]:
        """Requests that a stop token or their length has ended; their slots leave."""
        may_end = (self._stop_ids[flight.sampling_slots] == sampled[:, None]).any(axis=1) | flight.last
        rows = np.flatnonzero(may_end).tolist()
        if self._many_stops:
            rows += [row for row, request in enumerate(flight.sampling) if request in self._many_stops]
        finished = []
        for row in rows:
            request = flight.sampling[row]
            if request.finish_reason is None and (reason := _reason_to_end(request)):
                request.finish_reason = reason
                finished.append(request)
                self._leave(self._slot_of[request], requeue=False)
        return finished

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
        if self.restore is not None and leaving.keep:
            self._release_and_keep(slot, request, self.restore)
        else:
            self.manager.release(slot)
        self._marks.pop(slot, None)
        self._restored.pop(slot, None)
        self._unheard.pop(request, None)
        del self._slot_of[request]
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


def _reason_to_end(request: Request) -> FinishReason | None:
    params, output = request.params, request.output
    # A grammar lets its stop tokens through before that only where nothing else may follow.
    must_stop = request.grammar is not None and output[-1] in request.grammar.stop_ids
    if output[-1] in params.stop_token_ids and (len(output) >= params.min_tokens or must_stop):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(output) >= params.max_tokens else None


def _order(request: Request) -> int:
    """Place in the queue: first come, first served, shifted by priority."""
    return request.priority * PRIORITY_WORTH + request.arrival
