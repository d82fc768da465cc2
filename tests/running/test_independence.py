"""Greedy output does not depend on paging, chunking, batching or preemption; freed pages are poisoned throughout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.running.harness import Knobs, Run, generate
from tests.running.small_models import CONFIGS, WINDOW
from tests.running.test_against_transformers import prompt

NEW_TOKENS = 16
MIXES = ("gemma3", "gemma4 K = V", "gemma4 shared KV", "gemma4 everything", "qwen3-next", "falcon-h1")
# One of each further family, with its norms, biases, caps, multipliers and rotations.
OTHERS = tuple(name for name in CONFIGS if not name.startswith(("gemma3", "gemma4", "llama")) and name not in MIXES)
CHUNKS = (1, 16, 17, 100, WINDOW - 1, WINDOW, WINDOW + 1)  # a block and a window, one off, and all at once


@cache
def alone(name: str, seed: int, tokens: int, new_tokens: int) -> tuple[list[int], torch.Tensor]:
    run = generate(name, [prompt(seed, tokens)], new_tokens, Knobs())
    return run.outputs[0], torch.stack(run.logits[0])


def assert_same(run: Run, name: str, prompts: list[tuple[int, int]], new_tokens: int = NEW_TOKENS) -> None:
    assert_equal(run, [alone(name, seed, tokens, new_tokens) for seed, tokens in prompts])


def assert_equal(run: Run, expected: list[tuple[list[int], torch.Tensor]]) -> None:
    """Equal logits and tokens. Where the top two logits are too close to call, the outputs may part there."""
    for index, (output, logits) in enumerate(expected):
        same = [a == b for a, b in zip(run.outputs[index], output, strict=True)]
        parted_at = same.index(False) if False in same else len(output)
        assert parted_at >= 8, "hardly anything is equal"
        if parted_at < len(output):
            first, second = logits[parted_at].topk(2).values
            assert first - second <= 2e-4, f"token {parted_at} differs although its margin is clear"
        computed = torch.stack(run.logits[index][:parted_at])
        assert (computed - logits[:parted_at]).abs().max() <= 1e-4


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_chunk_sizes_change_nothing(name, chunk_tokens):
    knobs = Knobs(chunk_tokens=chunk_tokens, num_slots=1)
    assert_same(generate(name, [prompt(1, 77)], NEW_TOKENS, knobs), name, [(1, 77)])


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize(("block_tokens", "slab_bytes"), [(1, None), (16, None), (64, None), (16, 2**18)])
def test_block_and_slab_sizes_change_nothing(name, block_tokens, slab_bytes):
    knobs = Knobs(chunk_tokens=33, block_tokens=block_tokens, slab_bytes=slab_bytes)
    assert_same(generate(name, [prompt(1, 77)], NEW_TOKENS, knobs), name, [(1, 77)])


@pytest.mark.parametrize("name", MIXES)
def test_batch_mates_change_nothing(name):
    prompts = [(1, 77), (2, 5), (3, 130), (4, 1), (5, WINDOW)]
    run = generate(name, [prompt(*p) for p in prompts], NEW_TOKENS, Knobs(chunk_tokens=40))
    assert_same(run, name, prompts)


@pytest.mark.parametrize("name", [*MIXES, *OTHERS])
def test_preemption_changes_nothing(name):
    """Against the same batch with room for all."""
    prompts = [prompt(seed, 10) for seed in range(1, 5)]
    knobs = Knobs(chunk_tokens=64, block_tokens=16, growth_tokens=4)
    run, roomy = (generate(name, prompts, 40, replace(knobs, room=room)) for room in (2.2, 8.0))
    assert run.scheduler.preemptions > 0, "this test is about preemption"
    assert roomy.scheduler.preemptions == 0
    assert_equal(run, [(output, torch.stack(rows)) for output, rows in zip(roomy.outputs, roomy.logits, strict=True)])


@pytest.mark.parametrize("name", MIXES)
def test_sliding_layers_at_full_length_change_nothing(name):
    run = generate(name, [prompt(1, 77)], NEW_TOKENS, Knobs(chunk_tokens=50, swa_full=True))
    assert_same(run, name, [(1, 77)])


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(chunk_tokens=1, num_slots=1),
        Knobs(chunk_tokens=17, block_tokens=16),
        Knobs(chunk_tokens=WINDOW, block_tokens=64, swa_full=True),
    ],
    ids=["token by token", "small chunks", "sliding layers at full length"],
)
def test_families_depend_on_nothing_but_their_tokens(name, knobs):
    prompts = [(1, 77), (2, 70), (3, 130)][: knobs.num_slots]
    run = generate(name, [prompt(*p) for p in prompts], NEW_TOKENS, knobs)
    assert_same(run, name, prompts)
