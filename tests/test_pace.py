from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_scheduler import engine_for, request, solo_output
from windowpane.schedule.pace import FEWEST_TOKENS, FIRST_TOKENS, MOST_GROWTH, Pace


def steps_of(pace: Pace, cost: Callable[[int, int], float], prompt: int) -> list[tuple[int, float]]:
    """Tokens and seconds of each step of a long prompt, where `tokens` after `done` cost so much.

    As in the engine, a chunk is chosen while the one before it runs.
    """
    done, steps = 0, []
    while done < prompt:
        tokens = min(pace.tokens(), prompt - done)
        if steps:
            pace.observe(8, *steps[-1])
        steps.append((tokens, cost(tokens, done)))
        done += tokens
    return steps


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("limit", [100, 200, 400])
@pytest.mark.parametrize("warmed_up", [False, True])
def test_steps_keep_within_the_time_asked_for_on_slow_and_fast_machines(scale, limit, warmed_up):
    """A step reads weights in 17, and its tokens cost 0.1 each when there are many, twice that at the end."""

    def cost(tokens, done):
        return scale * (2 + max(15, tokens * 0.1) + tokens * 0.1 * done / 65_536)

    pace = Pace(limit * scale)
    for _ in range(5):
        pace.observe(8, 0, cost(8, 0))
    if warmed_up:
        pace.observe(0, 8192, cost(8192, 0))
    steps = steps_of(pace, cost, 65_536)
    assert max(seconds for _, seconds in steps) <= limit * scale
    assert min(seconds for _, seconds in steps[5:-1]) >= 0.8 * limit * scale


@given(st.floats(0.01, 100), st.floats(0, 1), st.floats(1e-3, 1), st.floats(0, 1), st.integers(1, 8192), st.booleans())
def test_no_step_is_much_longer_than_asked_for_on_any_machine(reading, fixed, per_token, growth, ending, alone):
    """Whatever reads, computes and attends how fast, give or take what a token's cost grows by within a chunk."""

    def cost(tokens, done):
        return fixed + max(reading, tokens * per_token) + tokens * per_token * growth * done / 65_536

    pace = Pace(max(2 * cost(FIRST_TOKENS, 65_536), 4 * (fixed + reading)))
    pace.observe(8, 0, cost(1, 0))
    if alone:
        pace.observe(0, ending, cost(ending, 0))
    for _, seconds in steps_of(pace, cost, 30_000):
        assert seconds <= 1.1 * pace.step_seconds


def test_the_first_steps_feel_their_way():
    pace = Pace(10.0)
    assert pace.tokens() == FIRST_TOKENS
    pace.observe(1, FIRST_TOKENS, 1e-6)  # however fast that was
    assert pace.tokens() == MOST_GROWTH * FIRST_TOKENS


def test_a_prompt_goes_on_however_slow_the_machine():
    pace = Pace(0.001)
    pace.observe(4, 0, 5.0)
    pace.observe(4, 256, 100.0)
    assert pace.tokens() == FEWEST_TOKENS
    pace.observe(4, 128, 20.0)
    assert pace.tokens() == 42  # a third of 128: (20 - 5) / 3 on top of 5 is twice what decoding takes


def test_a_prompt_alone_takes_the_whole_budget_and_beside_others_its_share():
    engine = engine_for(4, 4000, budget=1000)
    engine.scheduler.pace = Pace(1.0)
    long = [request("first", 2500, max_tokens=60), request("second", 2600, max_tokens=5)]
    engine.scheduler.add(long[0])
    alone = [len(c.tokens) for _ in range(3) for c in _next(engine).chunks]
    assert alone == [1000, 1000, 500]
    for _ in range(3):
        _next(engine)
    engine.scheduler.pace.observe(1, 0, 0.1)
    engine.scheduler.pace.observe(1, 200, 0.5)  # 0.0025 s a token
    engine.scheduler.add(long[1])
    beside = list(itertools.islice((len(c.tokens) for _ in range(4) for c in _next(engine).chunks), 4))
    assert beside == [360] * 4
    engine.run()
    assert [r.output for r in long] == [solo_output(r) for r in long]


def _next(engine):
    batch = engine.scheduler.schedule()
    assert batch is not None
    assert isinstance(batch.decode_slots, np.ndarray)
    engine.take(batch)
    engine.commit()
    return batch
