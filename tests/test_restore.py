"""Restore points through the real scheduler and manager, over a device model that checks every row that is read."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.kv.test_layout import layout_of
from tests.test_scheduler import FULL_AND_WINDOW, STOP, Engine, SchedulerMachine, solo_output
from windowpane.kv.caches import Cache, StateCache, StatePart, TokenCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.kv.retention import MIN_PREFIX_TOKENS, Chunk, Full, Window
from windowpane.schedule.request import Request, SamplingParams
from windowpane.schedule.scheduler import RequestTooLong, Scheduler

LONG = os.environ.get("WINDOWPANE_LONG")

FULL = [TokenCache(0, Full(), 1, 64, 64)]
STATE = [StateCache(i, (StatePart("recurrent", 4, 256),)) for i in range(1, 4)]
MIXES: dict[str, list[Cache]] = {
    "full": FULL,
    "full, window": FULL_AND_WINDOW,
    "two windows": [TokenCache(0, Window(64), 1, 64, 64), TokenCache(1, Window(24), 2, 64, 64)],
    "full, chunk": [*FULL, TokenCache(1, Chunk(48), 1, 64, 64)],
    "full, state": [*FULL, *STATE],
    "everything": [*FULL_AND_WINDOW, *(StateCache(i, (StatePart("recurrent", 2, 64),)) for i in range(2, 4))],
}
EVERY_MIX = pytest.mark.parametrize("mix", MIXES)


class RestoringMachine(SchedulerMachine):
    """As the scheduler's machine, with restore points kept, and prompts that begin alike."""

    keeps_restore_points = True

    @rule(
        stem=st.integers(0, 2),
        kept=st.integers(0, 60),
        rest=st.lists(st.integers(100, 102), max_size=20),
        ends=st.lists(st.integers(1, 70), max_size=3),
        max_tokens=st.integers(1, 40),
        salt=st.sampled_from(["", "", "other"]),
    )
    def add_alike(self, stem, kept, rest, ends, max_tokens, salt):
        prompt = [*(100 + (i * (stem + 1)) % 7 for i in range(kept)), *rest] or [1]
        params = SamplingParams(max_tokens, 0, (STOP,))
        ends = tuple(e for e in sorted(set(ends)) if e < len(prompt))
        one = Request(str(len(self.requests)), np.array(prompt), params, message_ends=ends, cache_salt=salt)
        self._add(one)

    @rule(pick=st.integers(0, 100), more=st.lists(st.integers(100, 102), max_size=5))
    def follow_up(self, pick, more):
        if not self.requests:
            return
        before = self.requests[pick % len(self.requests)]
        prompt = np.concatenate([before.prompt, np.array([*before.output, *more], dtype=np.int32)])
        self._add(Request(str(len(self.requests)), prompt, SamplingParams(5), cache_salt=before.cache_salt))

    @rule(pick=st.integers(0, 100))
    def ask_again(self, pick):
        if self.requests:
            before = self.requests[pick % len(self.requests)]
            self._add(Request(str(len(self.requests)), before.prompt, before.params, message_ends=before.message_ends))

    def _add(self, one: Request) -> None:
        try:
            self.engine.scheduler.add(one)
        except RequestTooLong:
            return
        self.requests.append(one)


class DraftingMachine(RestoringMachine):
    """Restore points and drafts: a point never keeps a draft that was not accepted."""

    with_drafts = True


TestDrafting = DraftingMachine.TestCase
TestRestoring = RestoringMachine.TestCase
TestRestoring.settings = settings(
    max_examples=int(LONG) if LONG else 60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


TestDrafting.settings = TestRestoring.settings


def engine_for(
    caches: list[Cache], *, sequences: float = 12, length: int = 400, budget: int = 4096, keeps: bool = True
) -> Engine:
    layout = layout_of(caches, block_tokens=16)
    slabs = Capacity(layout, 0).slabs_for(1, length)
    manager = KVManager(layout, int(sequences * slabs), 8, 10_000)
    return Engine(Scheduler(manager, budget, 32, RestorePoints(manager) if keeps else None))


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 2000, count).tolist()


def ask(engine: Engine, prompt: list[int], max_tokens: int = 8, **fields) -> Request:
    one = Request("r", np.array(prompt), SamplingParams(max_tokens), **fields)
    engine.scheduler.add(one)
    engine.run()
    engine.scheduler.manager.check_integrity()
    assert one.output == solo_output(one)
    return one


@EVERY_MIX
@pytest.mark.parametrize("budget", [7, 16, 50, 100, 4096])
def test_the_second_request_hits_at_the_end_of_the_system_prompt(mix, budget):
    engine = engine_for(MIXES[mix], budget=max(8, budget))
    system = tokens(0, 150)
    ends = (150, 170)
    first = ask(engine, system + tokens(1, 60), message_ends=ends)
    second = ask(engine, system + tokens(2, 60), message_ends=ends)
    assert (first.cached_tokens, second.cached_tokens) == (0, 150)
    assert first.cache_miss == "no earlier request began with these tokens"
    assert second.cache_miss is None


@EVERY_MIX
@pytest.mark.parametrize("budget", [8, 33, 4096])
def test_an_identical_prompt_needs_only_the_head(mix, budget):
    engine = engine_for(MIXES[mix], budget=budget)
    prompt = tokens(0, 201)
    ask(engine, prompt)
    before = engine.computed_tokens
    again = ask(engine, prompt, max_tokens=1)
    assert again.cached_tokens == 201
    assert engine.computed_tokens == before


@EVERY_MIX
def test_the_next_turn_reuses_the_answer(mix):
    engine = engine_for(MIXES[mix], budget=64)
    first = ask(engine, tokens(0, 150), max_tokens=20)
    second = ask(engine, [*first.prompt.tolist(), *first.output, *tokens(1, 30)])
    assert second.cached_tokens >= 150 + 20 - 1  # the last sampled token was never computed


@EVERY_MIX
def test_where_the_answer_is_not_reproduced_the_next_turn_resumes_before_it(mix):
    """A template that drops reasoning, say: the answer's tokens differ, the prompt up to the user's words does not."""
    engine = engine_for(MIXES[mix], budget=64)
    question = tokens(0, 150)
    ask(engine, [*question, 5, 6], max_tokens=100, message_ends=(40, 150))
    second = ask(engine, question + tokens(1, 30))
    assert second.cached_tokens == 150


@EVERY_MIX
@pytest.mark.parametrize("budget", [16, 4096])
def test_raw_completions_hit_at_a_discovered_branch_from_the_third_request_on(mix, budget):
    engine = engine_for(MIXES[mix], budget=budget)
    stem = tokens(0, 170)
    found = [ask(engine, stem + tokens(seed, 40)).cached_tokens for seed in (1, 2, 3, 4)]
    if mix == "full":
        assert found == [0, 170, 170, 170]  # full layers can resume anywhere before a restore point
    elif mix == "full, chunk":
        assert found == [0, 144, 170, 170]  # and a chunked one wherever a chunk begins
    else:
        assert found == [0, 0, 170, 170]


def test_a_hit_is_reported_only_where_every_group_can_resume():
    """300 tokens are shared and full pages of all of them kept, but the window's tail only at 100 and at the end."""
    engine = engine_for(FULL_AND_WINDOW)
    stem = tokens(0, 300)
    ask(engine, stem + tokens(1, 100), message_ends=(100,))
    second = ask(engine, stem + tokens(2, 100))
    assert second.cached_tokens == 100
    states = engine_for(MIXES["everything"])
    ask(states, stem + tokens(1, 100), message_ends=(100, 300, 350))
    assert ask(states, stem + tokens(2, 100)).cached_tokens == 100, "no state was kept at 300"


def test_short_prompts_are_shared_up_to_where_they_part():
    """Nothing has slid out of a window of 64 yet, so that windows too can resume anywhere."""
    engine = engine_for(FULL_AND_WINDOW)
    stem = tokens(0, 41)
    ask(engine, stem + tokens(1, 10))
    assert ask(engine, stem + tokens(2, 100)).cached_tokens == 41


def test_one_chunk_leaves_several_tails_without_being_cut():
    engine = engine_for(FULL_AND_WINDOW)
    ends = (30, 100, 101, 118, 250, 390)
    prompt = tokens(0, 400)
    engine.scheduler.add(Request("r", np.array(prompt), SamplingParams(4), message_ends=ends))
    batch = engine.scheduler.schedule()
    assert [len(c.tokens) for c in batch.chunks] == [400]
    engine.take(batch)
    engine.run()
    for end in ends:
        assert ask(engine, prompt[:end] + tokens(end, 20), max_tokens=2).cached_tokens == end


def test_states_are_kept_at_the_first_and_last_messages_ends_without_cutting_the_chunk():
    engine = engine_for(MIXES["full, state"])
    engine.scheduler.add(Request("r", np.arange(400), SamplingParams(4), message_ends=(30, 100, 250, 390)))
    batch = engine.scheduler.schedule()
    assert [len(c.tokens) for c in batch.chunks] == [400]
    assert [(snapshot.slot, snapshot.position) for snapshot in batch.changes.snapshots] == [(0, 30), (0, 390)]
    engine.take(batch)
    engine.run()
    assert sorted(point.length for point in engine.scheduler.manager.restore_points) == [30, 390, 400, 403]


@EVERY_MIX
def test_tenants_never_share_a_page(mix):
    engine = engine_for(MIXES[mix])
    manager = engine.scheduler.manager
    prompt = tokens(0, 200)
    for salt in ("a", "b"):
        first = ask(engine, prompt, message_ends=(80,), cache_salt=salt)
        assert first.cached_tokens == 0
    ask(engine, [*prompt, 1, 2, 3], cache_salt="b")
    points = {salt: set() for salt in ("a", "b")}
    for key, root in engine.scheduler.restoring.points.index._tree._roots.items():
        for node in root.below():
            if node.value is not None:
                for g in range(len(manager.tables)):
                    points[key.partition(":")[2]] |= {(g, int(o)) for o in manager.point_offsets(node.value, g)}
    assert points["a"]
    assert points["b"]
    assert not points["a"] & points["b"]


@EVERY_MIX
def test_nothing_is_found_before_its_step_has_landed(mix):
    engine = engine_for(MIXES[mix])
    prompt = tokens(0, 120)
    for name in ("first", "second"):
        engine.scheduler.add(Request(name, np.array(prompt), SamplingParams(4), message_ends=(50,)))
        assert engine.schedule()
    assert [r.cached_tokens for r in engine.scheduler.running.values()] == [0, 0]
    engine.run()
    assert ask(engine, prompt).cached_tokens == 120


@EVERY_MIX
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_preempted_sequence_resumes_from_what_it_left(mix, overlapped):
    engine = engine_for(MIXES[mix])
    one = Request("one", np.array(tokens(0, 90)), SamplingParams(150))
    engine.scheduler.add(one)
    for _ in range(40):
        engine.schedule(), engine.commit()
    if overlapped:
        engine.schedule()
    engine.scheduler._preempt(0)
    engine.run()
    assert one.output == solo_output(one)
    assert engine.computed_tokens == 90 + 150 - 1, "a token was computed twice"


@EVERY_MIX
def test_under_eviction_pressure_answers_stay(mix):
    engine = engine_for(MIXES[mix], sequences=3.5, length=220, budget=50)
    stems = [tokens(seed, 90) for seed in range(3)]
    for turn in range(25):
        ask(engine, stems[turn % 3] + tokens(turn % 5, 40 + turn), max_tokens=6, message_ends=(60, 90))
    assert engine.scheduler.cache_stats.evictions > 0
    assert engine.scheduler.cache_stats.hits > 0


def test_prompt_logprobs_skip_nothing():
    engine = engine_for(FULL_AND_WINDOW)
    prompt = tokens(0, 100)
    ask(engine, prompt)
    one = Request("r", np.array(prompt), SamplingParams(4, prompt_logprobs=0))
    engine.scheduler.add(one)
    engine.run()
    assert one.cached_tokens == 0
    assert one.cache_miss == "prompt_logprobs asks for every prompt token"


def test_what_is_too_short_to_matter_is_computed():
    engine = engine_for(FULL_AND_WINDOW)
    ask(engine, tokens(0, MIN_PREFIX_TOKENS - 1) + tokens(1, 50))
    assert ask(engine, tokens(0, MIN_PREFIX_TOKENS - 1) + tokens(2, 50)).cached_tokens == 0


def test_the_point_that_saves_least_per_byte_goes_first():
    """Of two prompts with equal tails the shorter one saves less."""
    engine = engine_for(FULL_AND_WINDOW, sequences=2.2, length=420)
    long, short = tokens(1, 400), tokens(2, 90)
    ask(engine, long, max_tokens=1)
    ask(engine, short, max_tokens=1)
    while engine.scheduler.cache_stats.evictions == 0:
        ask(engine, tokens(engine.computed_tokens, 300), max_tokens=1)
    assert ask(engine, long, max_tokens=1).cached_tokens == 400


def test_what_running_sequences_need_is_never_given_to_restore_points():
    """As many sequences run at once with restore points as without: pinned tails give way."""
    running = []
    for keeps in (False, True):
        engine = engine_for([TokenCache(0, Window(64), 1, 64, 64)], sequences=8, length=400, keeps=keeps)
        for i in range(8):
            engine.scheduler.add(Request(str(i), np.array(tokens(i, 300)), SamplingParams(50)))
            engine.schedule(), engine.commit()
        running.append(len(engine.scheduler.running))
        engine.run()
    assert running == [8, 8]


def test_a_full_queue_of_identical_prompts_is_counted():
    engine = engine_for(FULL_AND_WINDOW)
    ask(engine, tokens(0, 64))
    ask(engine, tokens(0, 64))
    stats = engine.scheduler.cache_stats
    assert (stats.queries, stats.hits) == (128, 64)
    assert stats.restore_points > 0
    assert stats.cached_bytes == engine.scheduler.manager.cached_bytes > 0
