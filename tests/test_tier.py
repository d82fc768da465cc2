"""The host tier through the real scheduler and manager, over a device model that checks every row that is read.

The model copies a page at the last moment that is allowed, and fails where the page has changed since the copy began or
was written before it was over.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from tests.kv.test_layout import layout_of
from tests.test_restore import EVERY_MIX, LONG, MIXES, RestoringMachine, ask, tokens
from tests.test_scheduler import FULL_AND_WINDOW, Engine, solo_output
from windowpane.kv.caches import Cache
from windowpane.kv.capacity import Capacity
from windowpane.kv.disk import DiskStore
from windowpane.kv.layout import OFFSET_UNIT_BYTES
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.kv.tier import HostTier
from windowpane.schedule.request import Request, SamplingParams
from windowpane.schedule.scheduler import Scheduler


class TierMachine(RestoringMachine):
    """As the machine of restore points, with a small host tier, transfers that land late, and steps that fail."""

    ahead = 0.5
    host_share = 0.7  # of the device's arena

    def make_tier(self, points: RestorePoints) -> HostTier:
        slabs = max(1, int(points.manager.arena.num_slabs * self.host_share))
        return HostTier(points, slabs, self.ahead)

    @rule(count=st.integers(1, 3))
    def land(self, count):
        self.engine.land(count)

    @rule()
    def lose_the_device(self):
        """Nothing on the device can be trusted, nor what was on its way."""
        if not self.engine.scheduler.running:
            self.engine.scheduler.forget_restore_points()

    @invariant()
    def host_agrees(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.tier.check_integrity()

    def teardown(self):
        super().teardown()
        if hasattr(self, "engine"):
            tier = self.engine.scheduler.tier
            tier.drop_points()
            tier.check_integrity()
            assert tier.books.arena.free_bytes == tier.books.arena.total_bytes, "idle, but bytes of the host are held"


TestTier = TierMachine.TestCase
TestTier.settings = settings(
    max_examples=int(LONG) if LONG else 60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class SpillingMachine(TierMachine):
    """Everything is spilled as soon as it is there, to a host that holds more than the device; with drafts."""

    ahead = 1.0
    host_share = 3
    with_drafts = True


TestSpilling = SpillingMachine.TestCase
TestSpilling.settings = TestTier.settings


class HostMemory:
    """The device model's host pages in real bytes, so that a disk can write and read them: a page holds a number."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = np.zeros(size_bytes, dtype=np.uint8)
        self._contents: list[dict[int, object]] = [{}]

    def _number(self, page: tuple[int, int]) -> np.ndarray:
        start = page[1] * OFFSET_UNIT_BYTES
        return self.bytes[start : start + 8].view(np.int64)

    def __setitem__(self, page: tuple[int, int], rows: dict[int, object]) -> None:
        self._number(page)[0] = len(self._contents)
        self._contents.append(rows)

    def __getitem__(self, page: tuple[int, int]) -> dict[int, object]:
        return self._contents[int(self._number(page)[0])]


class LazyDisk(DiskStore):
    """A disk whose thread does nothing by itself: the test says when it works."""

    def _work(self) -> None:
        pass

    def work(self, count: int) -> None:
        for _ in range(count):
            if not self._jobs.empty() and (job := self._jobs.get()) is not None:
                self._work_on(job)


class DiskMachine(TierMachine):
    """A small host and a disk that holds more, works late, and loses files."""

    host_share = 0.5

    def make_tier(self, points: RestorePoints) -> HostTier:
        tier = super().make_tier(points)
        self.memory = HostMemory(tier.books.arena.total_bytes)
        self.directory = tempfile.TemporaryDirectory()
        layout, size_bytes = points.manager.layout, 3 * tier.books.arena.total_bytes
        self.disk = LazyDisk(Path(self.directory.name), size_bytes, "one", layout, [self.memory.bytes])
        tier.use_disk(self.disk)
        return tier

    @invariant()
    def pages_of_the_host_are_bytes(self):
        if hasattr(self, "engine"):
            self.engine.device.host = self.memory

    @rule(count=st.integers(1, 4))
    def work_on_disk(self, count):
        self.disk.work(count)

    @rule()
    def lose_a_file(self):
        for file in sorted(Path(self.directory.name).glob("*.kv"))[:1]:
            file.unlink()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine, scheduler = self.engine, self.engine.scheduler
        while scheduler.has_work or scheduler.steps_in_flight:
            self.disk.work(100)
            may_schedule = scheduler.steps_in_flight < engine.most_in_flight
            if may_schedule and engine.schedule():
                continue
            if scheduler.steps_in_flight:
                engine.commit()
            else:
                engine.land(len(engine.device.under_way))
        self.disk.work(1000)
        scheduler.tier.take_from_disk()
        super().teardown()
        os.close(self.disk._lock)
        self.directory.cleanup()


TestDisk = DiskMachine.TestCase
TestDisk.settings = TestTier.settings


def engine_for(
    caches: list[Cache], *, sequences: float, host: float, length: int = 400, budget: int = 4096, ahead: float = 0.5
) -> Engine:
    """An engine whose arena holds so many sequences of this length, and whose host so many."""
    layout = layout_of(caches, block_tokens=16)
    slabs = Capacity(layout, 0).slabs_for(1, length)
    manager = KVManager(layout, int(sequences * slabs), 8, 10_000)
    points = RestorePoints(manager)
    tier = HostTier(points, int(host * slabs), ahead)
    return Engine(Scheduler(manager, budget, 32, points, tier=tier))


@EVERY_MIX
def test_sessions_beyond_the_arena_take_turns_without_computing_anything_again(mix):
    engine = engine_for(MIXES[mix], sequences=2.5, host=16)
    sessions = [tokens(seed, 300) for seed in range(6)]
    first = [ask(engine, session) for session in sessions]
    assert not any(one.cached_tokens for one in first)
    sessions = [[*s, *one.output, *tokens(9, 5)] for s, one in zip(sessions, first, strict=True)]
    second = [ask(engine, session) for session in sessions]
    assert [one.cached_tokens for one in second] == [300 + 8 - 1] * 6
    stats = engine.scheduler.tier.stats
    assert stats.fetches >= 4 and stats.fetched_bytes and stats.spilled_bytes


def test_without_the_tier_they_compute_everything_again():
    engine = engine_for(FULL_AND_WINDOW, sequences=2.5, host=0)
    sessions = [tokens(seed, 300) for seed in range(6)]
    outputs = [ask(engine, session).output for session in sessions]
    again = [ask(engine, [*s, *o, 5]) for s, o in zip(sessions, outputs, strict=True)]
    assert [one.cached_tokens for one in again] == [0] * 6
    assert engine.scheduler.tier.stats.fetches == 0


def test_a_point_is_copied_once_and_its_next_turn_only_with_what_is_new():
    engine = engine_for(FULL_AND_WINDOW, sequences=8, host=16, ahead=1.0)
    first = ask(engine, tokens(0, 400))
    spilled = engine.scheduler.tier.stats.spilled_bytes
    ask(engine, [*first.prompt.tolist(), *first.output, *tokens(1, 20)])
    more = engine.scheduler.tier.stats.spilled_bytes - spilled
    layout = engine.scheduler.manager.layout
    window = next(g for g in layout.groups if not g.grows)
    full = next(g for g in layout.groups if g.grows)
    # Two more points: at most two tails of the window, and the full pages of 28 tokens.
    assert more <= 2 * window.max_pages(400) * window.page_bytes + 3 * full.page_bytes


def test_others_go_on_while_a_session_is_fetched():
    engine = engine_for(FULL_AND_WINDOW, sequences=2.5, host=16)
    sessions = [ask(engine, tokens(seed, 300)) for seed in range(5)]
    back = Request("back", np.array([*sessions[0].prompt.tolist(), *sessions[0].output, 5]), SamplingParams(4))
    other = Request("other", np.array(tokens(50, 20)), SamplingParams(30))
    engine.scheduler.add(back)
    engine.scheduler.add(other)
    while not other.output[10:]:
        engine.schedule()
        engine.commit()
    assert not back.output and back in engine.scheduler.running.values(), "it waits in its slot"
    engine.run()
    assert back.output == solo_output(back) and other.output == solo_output(other)
    assert back.cached_tokens == 307


def test_a_request_that_is_cancelled_while_its_pages_come_gives_everything_back():
    engine = engine_for(FULL_AND_WINDOW, sequences=2.5, host=16)
    sessions = [ask(engine, tokens(seed, 300)) for seed in range(5)]
    back = Request("back", np.array([*sessions[0].prompt.tolist(), *sessions[0].output, 5]), SamplingParams(4))
    engine.scheduler.add(back)
    engine.schedule()
    engine.commit()
    engine.scheduler.cancel(back)
    engine.run()
    engine.scheduler.manager.check_idle()
    again = ask(engine, back.prompt.tolist())
    assert again.cached_tokens == 307, "what had been fetched is a restore point of the device"
    assert engine.scheduler.tier.stats.fetches == 1


def test_two_requests_for_one_session_fetch_it_once():
    engine = engine_for(FULL_AND_WINDOW, sequences=4, host=16)
    sessions = [ask(engine, tokens(seed, 300)) for seed in range(8)]
    prompt = [*sessions[0].prompt.tolist(), *sessions[0].output, 5]
    both = [Request(str(i), np.array([*prompt, i]), SamplingParams(4)) for i in range(2)]
    for one in both:
        engine.scheduler.add(one)
    engine.run()
    assert [one.cached_tokens for one in both] == [307, 307]
    assert engine.scheduler.tier.stats.fetches == 1
    assert [one.output for one in both] == [solo_output(one) for one in both]


def test_a_session_waits_for_room_rather_than_be_computed_again():
    """Resumed sequences pin a window beside their own, so fewer of them fit at once than of those that begin afresh."""
    engine = engine_for(MIXES["two windows"], sequences=3, host=40, length=340)
    sessions = [ask(engine, tokens(seed, 300)) for seed in range(9)]
    turns = [
        Request(str(i), np.array([*s.prompt.tolist(), *s.output, 5]), SamplingParams(9)) for i, s in enumerate(sessions)
    ]
    for turn in turns:
        engine.scheduler.add(turn)
    engine.run()
    assert [turn.cached_tokens for turn in turns] == [307] * 9
    assert [turn.output for turn in turns] == [solo_output(turn) for turn in turns]


def test_as_many_sessions_come_back_at_once_as_fit_afresh():
    """Where there is no room for a fetched point beside its sequence, the sequence takes its windows over."""
    engine = engine_for(MIXES["two windows"], sequences=3, host=40, length=340)
    sessions = [ask(engine, tokens(seed, 300)) for seed in range(9)]
    for i, s in enumerate(sessions[:3]):
        engine.scheduler.add(Request(str(i), np.array([*s.prompt.tolist(), *s.output, 5]), SamplingParams(9)))
    most = 0
    while engine.scheduler.has_work:
        if engine.schedule() or engine.scheduler.steps_in_flight:
            engine.commit()
        engine.land(len(engine.device.under_way))
        most = max(most, len(engine.scheduler.running))
    assert most == 3


def test_what_is_computed_sooner_than_fetched_is_computed():
    engine = engine_for(FULL_AND_WINDOW, sequences=2.5, host=16)
    sessions = [ask(engine, tokens(seed, 300)) for seed in range(5)]
    engine.scheduler.tier.speeds.computed(1000, seconds=1e-4)
    again = ask(engine, [*sessions[0].prompt.tolist(), *sessions[0].output, 5])
    assert again.cached_tokens == 0
    assert engine.scheduler.tier.stats.fetches == 0


def test_a_preempted_request_goes_on_where_it_stood():
    engine = engine_for(FULL_AND_WINDOW, sequences=2, host=16, length=320)
    requests = [Request(str(i), np.array(tokens(i, 100)), SamplingParams(200)) for i in range(4)]
    for one in requests:
        engine.scheduler.add(one)
    engine.run()
    assert engine.scheduler.preemptions > 0
    assert [one.output for one in requests] == [solo_output(one) for one in requests]
    needed = sum(len(one.prompt) + len(one.output) - 1 for one in requests)
    assert engine.computed_tokens == needed, "no token was computed twice"


def test_tenants_share_nothing_on_the_host_either():
    engine = engine_for(FULL_AND_WINDOW, sequences=2.5, host=16, ahead=1.0)
    prompt = tokens(0, 300)
    ask(engine, prompt, cache_salt="one")
    for seed in range(1, 6):
        ask(engine, tokens(seed, 300))
    assert ask(engine, [*prompt, 5], cache_salt="other").cached_tokens == 0
    assert ask(engine, [*prompt, 5], cache_salt="one").cached_tokens == 300
    assert engine.scheduler.tier.stats.fetches == 1


def test_an_adapter_finds_its_own_pages_on_the_host():
    engine = engine_for(FULL_AND_WINDOW, sequences=2.5, host=16, ahead=1.0)
    prompt = tokens(0, 300)
    ask(engine, prompt, adapter=1)
    for seed in range(1, 6):
        ask(engine, tokens(seed, 300))
    assert ask(engine, [*prompt, 5], adapter=2).cached_tokens == 0
    assert ask(engine, [*prompt, 5], adapter=1).cached_tokens == 300
    assert engine.scheduler.tier.stats.fetches == 1


@EVERY_MIX
def test_an_identical_prompt_needs_only_the_head_from_the_host_too(mix):
    engine = engine_for(MIXES[mix], sequences=2.5, host=16, ahead=1.0)
    prompt = tokens(0, 301)
    ask(engine, prompt)
    for _ in range(2):
        for point in engine.scheduler.manager.restore_points:
            engine.scheduler.manager.drop(point)
        before = engine.computed_tokens
        again = ask(engine, prompt, max_tokens=1)
        assert (again.cached_tokens, engine.computed_tokens) == (301, before)
    assert engine.scheduler.tier.stats.fetches == 2


def test_the_host_gives_up_what_is_cheapest_to_lose():
    engine = engine_for(FULL_AND_WINDOW, sequences=2.5, host=4)
    for seed in range(12):
        ask(engine, tokens(seed, 300))
    tier = engine.scheduler.tier
    tier.check_integrity()
    assert tier.stats.evictions > 0
    assert ask(engine, [*tokens(0, 300), 5]).cached_tokens == 0, "the oldest is gone"
    assert ask(engine, [*tokens(9, 300), 5]).cached_tokens == 300


def test_what_the_host_gives_up_while_others_are_spilled_is_not_fetched():
    """Room is made on the host point by point, until one is worth more than what comes: those before it are gone."""
    engine = engine_for(FULL_AND_WINDOW, sequences=2.5, host=16, ahead=0.0)
    sessions = [ask(engine, tokens(seed, 300)) for seed in range(6)]
    tier, dropped = engine.scheduler.tier, []

    def give_up(pages, score):
        dropped.extend(point for point in tier.books.points if not point.pending)
        tier.drop_points()
        return False

    tier._make_room = give_up
    again = ask(engine, [*sessions[0].prompt.tolist(), *sessions[0].output, 5])
    assert dropped and again.cached_tokens == 0
    assert again.output == solo_output(again)


def test_an_engine_without_requests_works_until_nothing_is_on_its_way():
    engine = engine_for(FULL_AND_WINDOW, sequences=8, host=16, ahead=1.0)
    ask(engine, tokens(0, 300))
    assert not engine.scheduler.has_work
    engine.scheduler.manager.check_idle()
    assert engine.scheduler.tier.stats.restore_points == engine.scheduler.cache_stats.restore_points


def test_dropping_restore_points_drops_those_of_the_host():
    engine = engine_for(FULL_AND_WINDOW, sequences=8, host=16, ahead=1.0)
    prompt = tokens(0, 300)
    ask(engine, prompt)
    assert engine.scheduler.drop_restore_points() == 4
    assert ask(engine, [*prompt, 5]).cached_tokens == 0


@pytest.mark.parametrize("mix", ["full, window", "everything"])
def test_after_a_failed_step_the_host_has_what_had_arrived(mix):
    engine = engine_for(MIXES[mix], sequences=8, host=16, ahead=1.0)
    one = ask(engine, tokens(0, 300))
    engine.scheduler.forget_restore_points()
    again = ask(engine, [*one.prompt.tolist(), *one.output, 5])
    assert again.cached_tokens == 307
    assert engine.scheduler.tier.stats.fetches == 1
