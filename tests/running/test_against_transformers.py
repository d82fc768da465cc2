from __future__ import annotations

import pytest
import torch

from tests.running.harness import Knobs, generate
from tests.running.small_models import CONFIGS, TEXT_PARTS, WINDOW, reference
from windowpane.native import build

PROMPT_TOKENS = 3 * WINDOW + 5
NEW_TOKENS = 64


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    return torch.randint(3, 160, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def reference_logits(name: str, tokens: list[int]) -> torch.Tensor:
    """Logits of every position, computed at once, without any cache."""
    return reference(name)(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        *((name, ops) for name in CONFIGS for ops in ("plain torch", "this machine's best")),
        *((name, "this machine's best") for name in TEXT_PARTS),
    ],
)
def test_logits_and_greedy_tokens_equal_the_reference(name, ops, monkeypatch):
    if ops == "plain torch":
        monkeypatch.setattr(build, "library", lambda: None)
    start = prompt(seed=1)
    run = generate(name, [start], NEW_TOKENS, Knobs(chunk_tokens=50))
    output = run.outputs[0]
    expected = reference_logits(name, [*start, *output])[len(start) - 1 : -1]
    computed = torch.stack(run.logits[0])
    assert (computed - expected).abs().max() <= 1e-4
    assert output == expected.argmax(dim=-1).tolist()
    assert len(set(output)) > 10, "a model that echoes a few tokens proves little"


@pytest.mark.parametrize(("prompt_tokens", "new_tokens"), [(20, 30), (50, 30)])
def test_long_rope_is_chosen_by_the_longest_length(prompt_tokens, new_tokens):
    """Up to 64 tokens the short factors are used, above them the long ones, from the first token on."""
    name, start = "phi3 long rope, three quarters of each head", prompt(2, prompt_tokens)
    run = generate(name, [start], new_tokens, Knobs())
    expected = reference_logits(name, [*start, *run.outputs[0]])[prompt_tokens - 1 : -1]
    assert (torch.stack(run.logits[0]) - expected).abs().max() <= 1e-4
