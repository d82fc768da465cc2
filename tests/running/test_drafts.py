"""Greedy output does not depend on drafts, right or wrong, for windows, latents, shared KV, states and experts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.running.harness import Knobs, generate
from tests.running.test_against_transformers import prompt
from tests.running.test_independence import alone, assert_same
from windowpane.drafts.drafter import Asking
from windowpane.drafts.ngram import NgramDrafter
from windowpane.schedule.request import Request, Tokens

NEW_TOKENS = 40
MIXES = (
    "gemma3",
    "gemma4 K = V",
    "gemma4 shared KV",
    "gemma4 everything",
    "qwen3-next",
    "falcon-h1",
    "llama 4",
    "gpt-oss",
    "lfm2",
)
PROMPTS = [(1, 77), (2, 5), (3, 30)]


class Guess:
    """What the requests answer alone, except every fourth token; prompt lookup where that is over."""

    def __init__(self, name: str) -> None:
        self._answers = [alone(name, *p, NEW_TOKENS)[0] for p in PROMPTS]
        self._ngram = NgramDrafter(3, 1)

    def __call__(self, request: Request, most: int) -> Tokens:
        come, answer = len(request.output), self._answers[int(request.id)]
        if come % 3 == 2:
            return self._ngram.propose([Asking(request, 0, request.known_tokens - 1, most)])[0]
        known = np.array(answer[come : come + most], dtype=np.int32)
        return np.where(np.arange(come, come + len(known)) % 4 == 3, 7, known).astype(np.int32)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_drafts_change_nothing(name, drafts):
    knobs = Knobs(chunk_tokens=40, block_tokens=16, drafts=drafts, guess=Guess(name))
    run = generate(name, [prompt(*p) for p in PROMPTS], NEW_TOKENS, knobs)
    assert run.accepted_drafts > NEW_TOKENS / 2
    assert_same(run, name, PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize("name", ["gemma4 everything", "qwen3-next"])
def test_drafts_preemption_and_restore_points_change_nothing(name):
    knobs = Knobs(chunk_tokens=40, block_tokens=16, drafts=3, guess=Guess(name), room=1.4, growth_tokens=4, keep=True)
    run = generate(name, [prompt(*p) for p in PROMPTS], NEW_TOKENS, knobs)
    assert run.scheduler.preemptions > 0
    assert_same(run, name, PROMPTS, NEW_TOKENS)
