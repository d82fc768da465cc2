from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.test_scheduler import engine_for, request, solo_output
from windowpane.pace import FEWEST_TOKENS, FIRST_TOKENS, MOST_GROWTH, Pace


def steps_of(pace: Pace, base: float, per_token: float, per_past: float, prompt: int) -> list[tuple[int, float]]:
    """Tokens and seconds of each step that a long prompt takes on a machine that costs this much."""
    done, steps = 0, []
    while done < prompt:
        tokens = min(pace.tokens(), prompt - done)
        seconds = base + tokens * (per_token + per_past * done)
        pace.observe(8, tokens, seconds)
        steps.append((tokens, seconds))
        done += tokens
    return steps


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0])
def test_steps_settle_at_the_time_asked_for_on_slow_and_fast_machines(scale):
    """The cost of a token grows fourfold along the prompt, as attention over a long past makes it."""
    pace = Pace(200 * scale)
    for _ in range(5):
        pace.observe(8, 0, 20 * scale)
    steps = steps_of(pace, 20 * scale, 0.1 * scale, 0.3 * scale / 65_536, 65_536)
    settled = [seconds for _, seconds in steps[5:-1]]
    assert max(seconds for _, seconds in steps) <= 1.15 * 200 * scale
    assert min(settled) >= 0.85 * 200 * scale


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
    engine.scheduler.pace.observe(1, 200, 0.5)  # 0.002 s a token
    engine.scheduler.add(long[1])
    beside = list(itertools.islice((len(c.tokens) for _ in range(4) for c in _next(engine).chunks), 4))
    assert beside == [450] * 4
    engine.run()
    assert [r.output for r in long] == [solo_output(r) for r in long]


def _next(engine):
    batch = engine.scheduler.schedule()
    assert batch is not None
    assert isinstance(batch.decode_slots, np.ndarray)
    engine.take(batch)
    engine.commit()
    return batch
