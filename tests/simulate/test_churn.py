from __future__ import annotations

from itertools import islice, pairwise

import pytest

from bench.churn import churn, layout_of
from windowpane.simulate.workloads import Chat


@pytest.mark.parametrize(
    ("model", "dtype", "gib"),
    [
        ("gemma-4-31b", "auto", 64.74),
        ("gemma-4-31b", "full=int8_per_token_head,window=bfloat16", 64.74),
        ("qwen3-next-80b-a3b", "auto", 24),
    ],
)
def test_chat_at_95_percent_load_strands_at_most_3_percent(model, dtype, gib):
    """A slice of the day that `python -m bench.churn --hours 24` runs."""
    result = churn(layout_of(model, dtype), int(gib * 2**30), hours=0.02)
    assert result.finished > 50
    assert result.live_mean > 0.9
    assert result.stranded_max <= 0.03


def test_a_chat_turn_carries_its_history():
    turns = list(islice(Chat(sessions=3).turns(seed=1), 200))
    by_session: dict[int, list] = {}
    for turn in turns:
        by_session.setdefault(turn.session, []).append(turn)
    longest = max(by_session.values(), key=len)
    assert len(longest) > 2
    assert all(b.prompt_tokens > a.prompt_tokens + a.output_tokens for a, b in pairwise(longest))


def test_workloads_are_seeded_and_keep_to_their_limit():
    chat = Chat(max_tokens=2000)
    turns = list(islice(chat.turns(seed=3), 500))
    assert turns == list(islice(chat.turns(seed=3), 500))
    assert all(t.prompt_tokens + t.output_tokens <= 2000 for t in turns)
