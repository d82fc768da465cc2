"""What `bench.prefix` measures, on a smaller scale: its figures are of lookups that find something."""

from __future__ import annotations

import pytest

from bench.prefix import STEP_MS, hit_rate, layout_of, lookup_ms


@pytest.mark.parametrize("model", STEP_MS)
def test_a_long_prefix_is_found_among_many_others(model: str) -> None:
    assert lookup_ms(layout_of(model), repeats=2) > 0


@pytest.mark.parametrize(("model", "sessions"), [("gemma-4-31b", 11), ("qwen3.5-27b", 18)])
def test_sessions_that_fit_are_all_found_again(model: str, sessions: int) -> None:
    """As docs/restore-points.md tells it: the first of three rounds finds nothing, the others everything."""
    assert hit_rate(layout_of(model), sessions) == pytest.approx(2 / 3, abs=0.01)
    assert hit_rate(layout_of(model), sessions + 1) == 0
