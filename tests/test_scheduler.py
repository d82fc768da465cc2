from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.kv.device import Device, given_up
from tests.kv.strategies import layouts
from tests.kv.test_layout import layout_of
from windowpane.kv.caches import StateCache, StatePart, TokenCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.changes import Changes
from windowpane.kv.layout import rollback_for
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.kv.retention import Full, State, Window
from windowpane.kv.tier import HostTier
from windowpane.runners.plain import verifies_only
from windowpane.schedule.batch import Batch, PromptChunk, accepted
from windowpane.schedule.request import FinishReason, Request, SamplingParams
from windowpane.schedule.scheduler import MAX_PREEMPTIONS, PATIENCE, RequestTooLong, Scheduler
from windowpane.schedule.step import LAST_SAMPLED

STOP = 7
LATER = -2  # a draft that is made when its step runs
LONG = os.environ.get("WINDOWPANE_LONG")  # examples to run instead of the fast slice, e.g. 20000 for a million steps


def next_token(history: tuple[int, ...]) -> int:
    """The model: any deterministic function of the whole history, now and then a stop token."""
    return hash(history) % 60


def solo_output(request: Request) -> list[int]:
    """What the request answers when it runs alone, without pages or batches."""
    history, output = tuple(request.prompt.tolist()), []
    while len(output) < request.params.max_tokens:
        token = next_token(history)
        output.append(token)
        history += (token,)
        if token in request.params.stop_token_ids and len(output) >= request.params.min_tokens:
            break
    return output


class Engine:
    """A scheduler over the device model. Steps run in order, each at some time between its schedule and its commit."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.drafter = np.random.default_rng(0)  # guesses right, or not
        self.device = Device(scheduler.manager)
        self.history: dict[int, tuple[int, ...]] = {}
        self.sampled: dict[int, int] = {}
        self.not_accepted: dict[int, int] = {}  # drafts of each slot's last step
        self.steps_ahead = 0
        self.pending: list[Batch] = []
        self.known: dict[tuple[int, int], tuple[int, ...]] = {}  # what a step's chunks take for computed
        self.given_up: dict[int, set[tuple[int, int]]] = {}
        self._close_step = scheduler.manager.take_changes
        scheduler.manager.take_changes = self._take_changes
        self.hidden: dict[int, tuple[int, ...]] = {}
        self.computed_tokens = 0
        self.done: list[tuple[list[int], list[int]]] = []

    def schedule(self) -> bool:
        if self.scheduler.may_go_ahead:
            drafts = self._drafts_ahead()
        else:
            drafts = self._drafts() if not self.scheduler.steps_in_flight else None
        batch = self.scheduler.schedule(drafts)
        if batch is None:
            return False
        self.steps_ahead += batch.is_ahead
        self.take(batch)
        return True

    def _drafts_ahead(self) -> dict[int, np.ndarray]:
        """For some sequences, some drafts that are made when the step runs: see `_made`."""
        rooms = {slot: self.scheduler.draft_room(slot) for slot in self.scheduler.decoding_slots.tolist()}
        return {
            slot: np.full(self.drafter.integers(1, room + 1), LATER)
            for slot, room in rooms.items()
            if room and self.drafter.random() < 0.8
        }

    def _made(self, chunk: PromptChunk, unsettled: Sequence[int]) -> PromptChunk:
        """What a chunk of a step that went ahead computes, now that its sequence is known."""
        history = (*self.history[chunk.slot], self.sampled[chunk.slot])
        assert chunk.tokens[0] in (LAST_SAMPLED, self.sampled[chunk.slot])
        assert chunk.tokens[1:].tolist() == [LATER] * chunk.drafts
        for _ in range(chunk.drafts):
            history += (next_token(history) if self.drafter.random() < 0.7 else 10_000 + self.computed_tokens,)
        start = chunk.start - (self.not_accepted[chunk.slot] if chunk.slot in unsettled else 0)
        assert start == len(self.history[chunk.slot])
        return replace(chunk, start=start, tokens=np.array(history[start:]))

    def _drafts(self) -> dict[int, np.ndarray]:
        """For some sequences, some tokens that are right with a probability of 0.7 each."""
        drafts = {}
        for slot, request in self.scheduler.running.items():
            room = self.scheduler.draft_room(slot)
            history = tuple(request.tokens(0, request.known_tokens).tolist())
            for _ in range(self.drafter.integers(0, room + 1) if self.drafter.random() < 0.8 else 0):
                history += (next_token(history) if self.drafter.random() < 0.7 else 10_000 + self.computed_tokens,)
            if len(history) > request.known_tokens:
                drafts[slot] = np.array(history[request.known_tokens :], dtype=np.int32)
        return drafts

    def take(self, batch: Batch) -> None:
        assert batch.num_tokens <= self.scheduler.max_num_batched_tokens
        for chunk in [] if batch.is_ahead else batch.chunks:
            known = self.scheduler.running[chunk.slot].tokens(0, chunk.start)
            self.known[batch.step, chunk.slot] = tuple(known.tolist())
        for transfer in batch.changes.transfers:
            if transfer.to_host:
                tier = self.scheduler.tier
                history = tuple(tier.index.content(tier._transfers[transfer.number].spilled)[1].tolist())
                hashes = [hash(history[:end]) for end in range(1, len(history) + 1)]
                self.device.kept[transfer.number] = {*hashes, ("state", hashes[-1]), "encoder"}
        self.pending.append(batch)

    def _take_changes(self) -> Changes:
        """Look at the books just when a step is closed: restore points kept after it belong to the next one."""
        changes = self._close_step()
        self.given_up[self.scheduler._step] = given_up(changes, self.scheduler.manager)
        return changes

    def run_step(self) -> None:
        batch = self.pending.pop(0)
        self.device.apply(batch.changes, self.given_up.pop(batch.step))
        state_slots = batch.state_slots.tolist()
        tokens, counts = [], []
        for slot, position in zip(batch.decode_slots.tolist(), batch.decode_positions.tolist(), strict=True):
            assert position - (self.not_accepted[slot] if slot in batch.unsettled else 0) == len(self.history[slot])
            self.not_accepted[slot] = 0
            self._compute(slot, (self.sampled[slot],), state_slots.pop(0))
            tokens.append(self._sample(slot))
            counts.append(1)
        stored = {c.slot: self.hidden[c.hidden] for c in batch.chunks if c.hidden is not None}
        assert verifies_only(batch) == bool(batch.chunks and all(c.drafts is not None for c in batch.chunks))
        for chunk in batch.chunks:
            if chunk.start == 0:
                self.device.write_encoder(chunk.slot)
            if batch.is_ahead:
                chunk, before = self._made(chunk, batch.unsettled), self.history[chunk.slot]
            else:
                before = self.known.pop((batch.step, chunk.slot))
            assert chunk.start == len(before)
            self.history[chunk.slot] = before
            state_slot = state_slots.pop(0)
            if len(chunk.tokens):
                self._compute(chunk.slot, tuple(chunk.tokens.tolist()), state_slot)
                if verifies_only(batch):
                    self.device.read_rows(chunk.slot, self.history[chunk.slot], chunk.start)
            else:
                assert stored[chunk.slot] == before, "another prompt's hidden state"
            if chunk.keep_hidden is not None:
                self.hidden[chunk.keep_hidden] = self.history[chunk.slot]
            if chunk.samples:
                sampled = self._verify(chunk)
                tokens += sampled
                counts.append(len(sampled))
        self.device.after_step(batch.changes)
        self.done.append((tokens, counts if batch.drafts else None))

    def commit(self) -> list[Request]:
        while not self.done:
            self.run_step()
        tokens, counts = self.done.pop(0)
        return self.scheduler.commit(tokens, counts)

    def run(self, limit: int = 100_000, *, goes_ahead: bool = False) -> None:
        for _ in range(limit):
            may_schedule = self.scheduler.steps_in_flight < self.most_in_flight
            scheduled = may_schedule and self.schedule()
            if may_schedule and not scheduled and not self.scheduler.steps_in_flight:
                if not self.device.under_way:
                    break
                self.land(len(self.device.under_way))
                continue
            if not (goes_ahead and self.scheduler.may_go_ahead):
                self.commit()
        assert not self.scheduler.has_work, "work is left but nothing can be scheduled"

    def land(self, count: int) -> None:
        """Finish transfers between tiers that have begun, in order among those to the host and among the others."""
        begun = sorted(self.device.under_way.values(), key=lambda transfer: (transfer.to_host, transfer.number))
        for transfer in begun[:count]:
            self.device.finish(transfer.number)
            self.scheduler.land([(transfer.number, 1e-3)])

    @property
    def most_in_flight(self) -> int:
        is_verifying = self.scheduler._unlanded and self.scheduler._unlanded[-1].verifying
        return 1 if is_verifying and not self.scheduler.may_go_ahead else self.scheduler.most_in_flight

    def _verify(self, chunk: PromptChunk) -> list[int]:
        """The tokens sampled behind the last known one and behind all drafts that are right."""
        drafts = chunk.draft_tokens.tolist()
        history = self.history[chunk.slot][: len(self.history[chunk.slot]) - len(drafts)]
        sampled = [next_token((*history, *drafts[:count])) for count in range(len(drafts) + 1)]
        count = accepted(sampled, chunk.draft_tokens)
        self.history[chunk.slot] = (*history, *drafts[:count])
        self.sampled[chunk.slot] = sampled[count]
        self.not_accepted[chunk.slot] = len(drafts) - count
        return sampled[: count + 1]

    def _compute(self, slot: int, tokens: tuple[int, ...], state_slot: int) -> None:
        old = len(self.history[slot])
        self.computed_tokens += len(tokens)
        self.history[slot] += tokens
        self.device.step(slot, self.history[slot], old, old + len(tokens), state_slot)

    def _sample(self, slot: int) -> int:
        self.sampled[slot] = next_token(self.history[slot])
        return self.sampled[slot]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are cancelled and preempted while up to two steps are in flight; answers never change."""

    keeps_restore_points = False
    with_drafts = False

    @initialize(
        layout=layouts(),
        share=st.integers(60, 400),
        slots=st.integers(1, 5),
        budget=st.integers(5, 80),
        growth=st.integers(1, 40),
        drafts=st.integers(1, 5),
    )
    def begin(self, layout, share, slots, budget, growth, drafts):
        in_one_slot = any(g.retention == State(1) for g in layout.groups)
        drafts = drafts if self.with_drafts and not in_one_slot else 0
        rollback = rollback_for(drafts, layout)
        whole = Capacity(layout, 0, rollback).slabs_for(1, 120)
        manager = KVManager(layout, max(1, whole * share // 100), slots, 120, rollback)
        points = RestorePoints(manager, hidden_rows=3) if self.keeps_restore_points else None
        budget = max(budget, slots * (1 + drafts))
        tier = self.make_tier(points)
        self.engine = Engine(Scheduler(manager, budget, growth, points, draft_tokens=drafts, tier=tier))
        self.requests: list[Request] = []

    def make_tier(self, points: RestorePoints | None) -> HostTier | None:
        return None

    @rule(
        prompt=st.lists(st.integers(100, 110), min_size=1, max_size=60),
        max_tokens=st.integers(1, 60),
        min_tokens=st.integers(0, 3),
        stops=st.sampled_from([(), (STOP,), tuple(range(6))]),
        priority=st.integers(-1, 1),
    )
    def add(self, prompt, max_tokens, min_tokens, stops, priority):
        params = SamplingParams(max_tokens, min(min_tokens, max_tokens), stops)
        request = Request(str(len(self.requests)), np.array(prompt), params, priority)
        try:
            self.engine.scheduler.add(request)
        except RequestTooLong:
            return
        self.requests.append(request)

    @rule(pick=st.integers(0, 100))
    def cancel(self, pick):
        if self.requests:
            self.engine.scheduler.cancel(self.requests[pick % len(self.requests)])

    @rule()
    def schedule(self):
        if self.engine.scheduler.steps_in_flight < self.engine.most_in_flight:
            self.engine.schedule()

    @rule()
    def run_step(self):
        if self.engine.pending:
            self.engine.run_step()

    @rule()
    def commit(self):
        if self.engine.scheduler.steps_in_flight:
            self.engine.commit()

    @invariant()
    def books_agree(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.manager.check_integrity()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        self.engine.run()
        while scheduler.steps_in_flight:
            self.engine.commit()
        scheduler.manager.check_integrity()
        scheduler.forget_restore_points()
        assert scheduler.manager.free_bytes == scheduler.manager.arena.total_bytes, "idle, but bytes are held"
        for request in self.requests:
            assert request.preemptions <= MAX_PREEMPTIONS
            expected = solo_output(request)
            if request.finish_reason is FinishReason.CANCELLED:
                assert request.output == expected[: len(request.output)]
            else:
                assert request.output == expected
                stopped = expected[-1] in request.params.stop_token_ids and len(expected) >= request.params.min_tokens
                assert request.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=int(LONG) if LONG else 60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class DraftingMachine(SchedulerMachine):
    """The same with drafts in some steps, of which some are right, and the same answers."""

    with_drafts = True


TestDrafting = DraftingMachine.TestCase
TestDrafting.settings = TestScheduler.settings


class KeepingDraftsMachine(DraftingMachine):
    """With restore points too: they hold accepted tokens only."""

    keeps_restore_points = True


TestKeepingDrafts = KeepingDraftsMachine.TestCase
TestKeepingDrafts.settings = TestScheduler.settings

FULL_AND_WINDOW = [TokenCache(0, Full(), 1, 64, 64), TokenCache(1, Window(64), 1, 64, 64)]


def engine_for(
    sequences: int, length: int, *, slots: int = 64, budget: int = 256, growth: int = 32, caches=None, drafts: int = 0
) -> Engine:
    """An engine whose arena holds so many sequences of this length."""
    layout = layout_of(caches or FULL_AND_WINDOW, block_tokens=16)
    rollback = rollback_for(drafts, layout)
    slabs = Capacity(layout, 0, rollback).slabs_for(sequences, length)
    manager = KVManager(layout, slabs, slots, 100_000, rollback)
    return Engine(Scheduler(manager, budget, growth, draft_tokens=drafts))


def request(name: str, prompt_tokens: int, max_tokens: int = 8, **kwargs) -> Request:
    return Request(name, np.arange(prompt_tokens) + 1000, SamplingParams(max_tokens), **kwargs)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers():
    engine = engine_for(1, 1000)
    with pytest.raises(RequestTooLong, match=r"2007 tokens need [\d,]+ bytes of KV and the arena has [\d,]+"):
        engine.scheduler.add(request("huge", 2000))
    with pytest.raises(RequestTooLong, match="exceed max_model_len 100000"):
        engine.scheduler.add(request("endless", 99_999, max_tokens=5))


def test_admission_does_not_thrash_and_renewal_alone_preempts():
    """Four sequences that outgrow the arena together: some are sent back, all end, answers unchanged."""
    engine = engine_for(2, 320, growth=16)
    requests = [request(str(i), 100, max_tokens=200) for i in range(4)]
    for r in requests:
        engine.scheduler.add(r)
    engine.run()
    assert engine.scheduler.preemptions > 0
    assert all(r.preemptions <= MAX_PREEMPTIONS for r in requests)
    assert [r.output for r in requests] == [solo_output(r) for r in requests]


def test_the_first_in_line_is_never_preempted():
    engine = engine_for(2, 320, growth=16)
    requests = [request(str(i), 100, max_tokens=200) for i in range(4)]
    for r in requests:
        engine.scheduler.add(r)
    engine.run()
    assert requests[0].preemptions == 0


def test_a_large_request_does_not_hold_up_small_ones_behind_it():
    engine = engine_for(1, 1000)
    engine.scheduler.add(request("running", 300, max_tokens=200))
    engine.schedule(), engine.commit()
    large, small = request("large", 900), request("small", 10)
    engine.scheduler.add(large)
    engine.scheduler.add(small)
    for _ in range(20):
        engine.schedule(), engine.commit()
    assert small.finish_reason is not None
    assert large.finish_reason is None


def test_nor_does_it_starve_behind_an_endless_stream_of_small_ones():
    engine = engine_for(1, 1000)
    large = request("large", 900)
    engine.scheduler.add(request("first", 400, max_tokens=30))
    engine.schedule(), engine.commit()
    engine.scheduler.add(large)
    overtaken = 0
    for step in range(2000):
        small = request(f"small {step}", 100, max_tokens=60)
        engine.scheduler.add(small)
        engine.schedule(), engine.commit()
        if large.output:
            break
        overtaken = large.bypassed
    assert large.output, "the large request starves"
    assert overtaken <= PATIENCE


def test_priority_is_worth_places_in_the_queue_but_not_for_ever():
    scheduler = engine_for(1, 1000).scheduler
    low, high = request("low", 10, priority=1), request("high", 10, priority=0)
    scheduler.add(low)
    scheduler.add(high)
    assert scheduler.waiting == [high, low]
    for i in range(1100):
        scheduler.add(request(f"late {i}", 10))
    assert scheduler.waiting.index(low) < 1100


def test_prompts_longer_than_all_memory_for_windows_run():
    engine = engine_for(1, 1100, budget=128)
    r = request("long", 1000, max_tokens=64)
    engine.scheduler.add(r)
    engine.run()
    assert r.output == solo_output(r)


def test_no_deadlock_with_every_request_half_prefilled():
    """Admission reserves whole prompts: never do two half-prefilled ones wait for each other's memory."""
    engine = engine_for(2, 1032, budget=100, slots=8)
    requests = [request(str(i), 1000) for i in range(8)]
    for r in requests:
        engine.scheduler.add(r)
    engine.run()
    assert engine.scheduler.preemptions == 0
    assert [r.output for r in requests] == [solo_output(r) for r in requests]


def test_cancelling_at_any_moment_returns_every_byte():
    for steps in range(12):
        engine = engine_for(4, 500, budget=64)
        requests = [request(str(i), 150, max_tokens=50) for i in range(4)]
        for r in requests:
            engine.scheduler.add(r)
        for i in range(steps):
            if engine.scheduler.steps_in_flight == 2 or not engine.schedule():
                engine.commit()
            if i % 3 == 2:
                engine.commit()
        for r in requests:
            engine.scheduler.cancel(r)
        while engine.scheduler.steps_in_flight:
            engine.commit()
        manager = engine.scheduler.manager
        assert manager.free_bytes == manager.arena.total_bytes
        assert not engine.scheduler.has_work


def test_a_page_is_not_freed_while_a_step_in_flight_reads_it():
    engine = engine_for(4, 500)
    r = request("r", 100)
    engine.scheduler.add(r)
    engine.schedule()
    engine.scheduler.cancel(r)
    manager = engine.scheduler.manager
    assert sum(manager.live_pages) > 0
    engine.commit()
    assert sum(manager.live_pages) == 0


def test_a_stop_found_one_step_late_drops_the_token_after_it():
    engine = engine_for(4, 500)
    r = Request("r", np.arange(50) + 1000, SamplingParams(200, stop_token_ids=tuple(range(20))))
    engine.scheduler.add(r)
    engine.schedule()
    while r.finish_reason is None:
        engine.schedule()
        engine.commit()
    assert r.output == solo_output(r)
    engine.commit()
    assert r.output == solo_output(r)
    assert not engine.scheduler.has_work


def test_a_state_model_keeps_the_state_before_the_token_in_flight():
    caches = [StateCache(i, (StatePart("recurrent", 4, 256),)) for i in range(3)]
    engine = engine_for(4, 500, caches=[*caches, TokenCache(3, Full(), 1, 64, 64)], budget=100)
    requests = [request(str(i), 130 + i, max_tokens=40) for i in range(6)]
    for r in requests:
        engine.scheduler.add(r)
    engine.run()
    assert [r.output for r in requests] == [solo_output(r) for r in requests]


def test_states_in_one_slot_allow_one_step_in_flight_and_no_drafts():
    caches = [StateCache(0, (StatePart("recurrent", 4, 256),), slots=1), TokenCache(1, Full(), 1, 64, 64)]
    engine = engine_for(2, 500, caches=caches, budget=100)
    engine.scheduler.add(first := request("0", 130, max_tokens=5))
    engine.schedule()
    with pytest.raises(RuntimeError, match="1 steps are in flight: commit one first"):
        engine.scheduler.schedule()
    engine.run()
    assert first.output == solo_output(first)
    with pytest.raises(ValueError, match="keep states in two slots"):
        Scheduler(KVManager(layout_of(caches), 10, 8, 100, rollback_tokens=4), 64, draft_tokens=3)


def test_a_step_serves_decoding_and_prefill_together_under_the_budget():
    engine = engine_for(8, 2000, budget=100)
    engine.scheduler.add(request("decoding", 20, max_tokens=50))
    engine.schedule(), engine.commit()
    engine.scheduler.add(request("prefilling", 300))
    batch = engine.scheduler.schedule()
    assert len(batch.decode_slots) == 1
    assert [len(c.tokens) for c in batch.chunks] == [99]


def test_too_small_a_budget_is_refused():
    layout = layout_of(FULL_AND_WINDOW)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(4\) must be at least max_num_seqs \(8\)"):
        Scheduler(KVManager(layout, 10, 8, 100), max_num_batched_tokens=4)


def test_a_third_step_in_flight_is_refused():
    engine = engine_for(4, 500)
    engine.scheduler.add(request("r", 100))
    engine.schedule(), engine.schedule()
    with pytest.raises(RuntimeError, match="commit one first"):
        engine.scheduler.schedule()


@pytest.mark.parametrize(("max_tokens", "min_tokens"), [(0, 0), (5, 6), (5, -1)])
def test_impossible_sampling_parameters_are_refused(max_tokens, min_tokens):
    with pytest.raises(ValueError, match="tokens must"):
        SamplingParams(max_tokens, min_tokens)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty prompt"):
        Request("r", np.array([]))


def test_accepted_drafts_save_steps_and_change_no_answer():
    steps = []
    for drafts in (0, 3):
        engine = engine_for(4, 500, slots=8, drafts=drafts)
        requests = [request(str(i), 100 + i, max_tokens=200) for i in range(4)]
        for r in requests:
            engine.scheduler.add(r)
        engine.run()
        assert [r.output for r in requests] == [solo_output(r) for r in requests]
        steps.append(engine.scheduler._step)
    assert steps[1] < 0.7 * steps[0]


def test_an_answer_ends_at_a_stop_token_among_accepted_drafts():
    engine = engine_for(1, 500, slots=1, drafts=3)
    scheduler, manager = engine.scheduler, engine.scheduler.manager
    one = Request("r", np.arange(20), SamplingParams(50, stop_token_ids=(STOP,)))
    scheduler.add(one)
    scheduler.schedule(), scheduler.commit([1])
    assert [c.drafts for c in scheduler.schedule({0: np.array([2, STOP, 3])}).chunks] == [3]
    assert scheduler.commit([2, STOP, 3, 4], [4]) == [one]
    assert (one.output, one.finish_reason) == ([1, 2, STOP], FinishReason.STOP)
    manager.check_idle()


def test_drafts_are_taken_back_where_they_are_not_accepted():
    engine = engine_for(1, 500, slots=1, drafts=3)
    scheduler, manager = engine.scheduler, engine.scheduler.manager
    scheduler.add(request("r", 20, max_tokens=50))
    scheduler.schedule(), scheduler.commit([1])
    batch = scheduler.schedule({0: np.array([2, 8, 9])})
    (chunk,) = batch.chunks
    assert (chunk.start, chunk.tokens.tolist(), batch.num_tokens, manager.lengths[0]) == (20, [1, 2, 8, 9], 4, 24)
    scheduler.commit([2, 3], [2])
    assert manager.lengths[0] == 22
    (chunk,) = scheduler.schedule({0: np.array([4, 5, 6])}).chunks
    assert (chunk.start, chunk.tokens.tolist()) == (22, [3, 4, 5, 6])
    with pytest.raises(ValueError, match="has 3 drafts in step 3, not 4"):
        scheduler.commit([1, 2, 3, 4, 5], [5])


def test_a_sequence_with_a_state_computes_accepted_tokens_again():
    engine = engine_for(1, 500, slots=1, drafts=3, caches=[StateCache(0, (StatePart("recurrent", 4, 256),))])
    scheduler, manager = engine.scheduler, engine.scheduler.manager
    scheduler.add(request("r", 20, max_tokens=50))
    scheduler.schedule(), scheduler.commit([1])
    scheduler.schedule({0: np.array([2, 8, 9])}), scheduler.commit([2, 3], [2])
    assert (manager.lengths[0], scheduler.draft_room(0)) == (20, 1), "a step has room for 3 drafts or what is behind"
    (chunk,) = scheduler.schedule({0: np.array([4])}).chunks
    assert (chunk.start, chunk.tokens.tolist(), chunk.drafts) == (20, [1, 2, 3, 4], 1)
    scheduler.commit([4, 5], [2])
    assert (manager.lengths[0], scheduler.draft_room(0)) == (24, 3)
    assert scheduler.schedule().decode_positions.tolist() == [24]


def test_no_draft_goes_beyond_the_end_of_an_answer():
    engine = engine_for(1, 500, slots=1, drafts=3)
    engine.scheduler.add(request("r", 20, max_tokens=3))
    engine.scheduler.schedule(), engine.scheduler.commit([1])
    assert engine.scheduler.draft_room(0) == 1


def test_a_step_that_hides_where_the_next_one_starts_is_waited_for():
    scheduler = engine_for(4, 500, slots=8, drafts=3).scheduler
    scheduler.add(request("r", 100))
    scheduler.schedule(), scheduler.commit([1])
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="hides where the next one starts"):
        scheduler.schedule({0: np.array([1])})
    scheduler.commit([1])
    scheduler.schedule({0: np.array([1])})
    scheduler.add(request("another", 100))
    with pytest.raises(RuntimeError, match="hides where the next one starts"):
        scheduler.schedule()  # a prompt needs chunks


def test_a_step_goes_ahead_of_one_with_drafts_and_lies_where_they_were_accepted():
    scheduler = engine_for(1, 500, slots=1, drafts=3).scheduler
    manager = scheduler.manager
    one = request("r", 20, max_tokens=50)
    scheduler.add(one)
    scheduler.schedule(), scheduler.commit([1])
    assert not scheduler.may_go_ahead
    scheduler.schedule({0: np.array([2, 3, 9])})
    assert scheduler.may_go_ahead and scheduler.draft_room(0) == 3
    batch = scheduler.schedule({0: np.array([-7, -8, -9])})
    (chunk,) = batch.chunks
    assert batch.is_ahead and (chunk.start, chunk.tokens.tolist()) == (24, [LAST_SAMPLED, -7, -8, -9])
    assert manager.lengths[0] == 28
    scheduler.commit([2, 3, 4], [3])
    assert (manager.lengths[0], one.output) == (27, [1, 2, 3, 4]), "one draft was not accepted"
    batch = scheduler.schedule({0: np.array([-7])})
    assert (batch.is_ahead, batch.chunks[0].start) == (True, 27)
    scheduler.commit([5], [1])
    scheduler.commit([6, 7], [2])
    assert (manager.lengths[0], one.output) == (26, [1, 2, 3, 4, 5, 6, 7])
    assert not scheduler.schedule({0: np.array([8])}).is_ahead


def test_a_sequence_that_may_be_at_its_end_waits_while_others_go_ahead():
    scheduler = engine_for(2, 500, slots=2, drafts=3).scheduler
    ending, other = request("ending", 20, max_tokens=5), request("other", 30, max_tokens=50)
    scheduler.add(ending), scheduler.add(other)
    scheduler.schedule(), scheduler.commit([1, 11])
    scheduler.schedule({0: np.array([2, 3, 9]), 1: np.array([12])})
    batch = scheduler.schedule({1: np.array([-7])})
    assert batch.unsettled == (0, 1) and [c.slot for c in batch.chunks] == [1] and not len(batch.decode_slots)
    scheduler.commit([2, 12, 13], [1, 2])
    assert (ending.output, other.output) == ([1, 2], [11, 12, 13])
    batch = scheduler.schedule({1: np.array([-8])})
    assert (batch.unsettled, batch.decode_slots.tolist(), batch.decode_positions.tolist()) == ((1,), [0], [21])
    scheduler.commit([14], [1])
    assert scheduler.manager.lengths.tolist() == [22, 35]
    scheduler.commit([3, 15, 16], [1, 2])
    assert (ending.output, other.output) == ([1, 2, 3], [11, 12, 13, 14, 15, 16])


@pytest.mark.parametrize("keep", [False, True])
def test_answers_are_the_same_where_most_steps_go_ahead(keep):
    windows = [TokenCache(layer, Window(tokens), 1, 64, 64) for layer, tokens in ((1, 40), (2, 17))]
    layout = layout_of([TokenCache(0, Full(), 1, 64, 64), *windows], block_tokens=16)
    rollback = rollback_for(4, layout)
    manager = KVManager(layout, Capacity(layout, 0, rollback).slabs_for(3, 400), 8, 1000, rollback)
    points = RestorePoints(manager) if keep else None
    engine = Engine(Scheduler(manager, 64, 16, points, draft_tokens=4))
    requests = [request(str(i), 30 + 7 * i, max_tokens=200) for i in range(12)]
    for r in requests:
        engine.scheduler.add(r)
    engine.run(goes_ahead=True)
    assert [r.output for r in requests] == [solo_output(r) for r in requests]
    assert engine.scheduler.preemptions and engine.steps_ahead > engine.scheduler._step / 2


def test_nobody_goes_ahead_where_an_answer_may_end():
    scheduler = engine_for(1, 500, slots=1, drafts=3).scheduler
    scheduler.add(request("r", 20, max_tokens=5))
    scheduler.schedule(), scheduler.commit([1])
    scheduler.schedule({0: np.array([2, 3, 9])})
    assert not scheduler.may_go_ahead, "all five tokens may be on their way"
    scheduler.commit([2], [1])
    assert scheduler.schedule().decode_positions.tolist() == [21]


def test_an_answer_is_kept_up_to_its_end_where_a_step_has_gone_on_behind_it():
    layout = layout_of(FULL_AND_WINDOW, block_tokens=16)
    manager = KVManager(layout, 60, 2, 1000, rollback_for(3, layout))
    points = RestorePoints(manager)
    scheduler = Scheduler(manager, 64, 32, points, draft_tokens=3)
    one = Request("r", np.arange(20), SamplingParams(50, stop_token_ids=(STOP,)))
    scheduler.add(one)
    scheduler.schedule(), scheduler.commit([1])
    scheduler.schedule({0: np.array([2, STOP, 3])})
    assert scheduler.schedule({0: np.array([-7, -8, -9])}).is_ahead
    assert scheduler.commit([2, STOP, 3, 4], [4]) == [one]
    assert (one.output, manager.lengths[0]) == ([1, 2, STOP], 28)
    assert scheduler.commit([5, 6], [2]) == []
    assert one.output == [1, 2, STOP]
    manager.check_idle()
    computed = np.array([*range(20), 1, 2, STOP, 3, 4, 5, 6, 7])
    assert points.look_up(one.prefix_key, computed, may_skip_last=False).length == 23


def test_drafts_that_could_not_be_taken_back_are_refused():
    layout = layout_of(FULL_AND_WINDOW)
    with pytest.raises(ValueError, match="3 drafts need a manager with rollback_tokens of at least 7, not 6"):
        Scheduler(KVManager(layout, 10, 8, 100, rollback_tokens=6), 64, draft_tokens=3)
    with pytest.raises(ValueError, match=r"\(8\) × 4 \(with 3 drafts each\)"):
        Scheduler(KVManager(layout, 10, 8, 100, rollback_tokens=7), 31, draft_tokens=3)
    states = layout_of([StateCache(0, (StatePart("recurrent", 4, 256),))])
    with pytest.raises(ValueError, match="3 drafts need a manager with rollback_tokens of at least 4, not 3"):
        Scheduler(KVManager(states, 10, 8, 100, rollback_tokens=3), 64, draft_tokens=3)
    with pytest.raises(ValueError, match="counts are for steps with drafts, and step 1 has none"):
        engine = engine_for(1, 500)
        engine.scheduler.add(request("r", 20))
        engine.scheduler.schedule()
        engine.scheduler.commit([1], [1])


def test_any_part_of_the_known_tokens_is_that_of_prompt_and_output():
    request = Request("a", np.arange(10, 15, dtype=np.int32))
    request.output += [3, 4, 5]
    known = [*range(10, 15), 3, 4, 5]
    for start in range(len(known) + 1):
        for stop in range(start, len(known) + 1):
            found = request.tokens(start, stop)
            assert found.tolist() == known[start:stop] and found.dtype == np.int32
