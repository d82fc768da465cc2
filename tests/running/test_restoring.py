"""Greedy output with restore points equals output without, for every kind of point; freed pages are poisoned."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.running.harness import Knobs, Run, generate
from tests.running.small_models import WINDOW, WITH_STATES
from tests.running.test_against_transformers import prompt
from tests.running.test_independence import OTHERS

NEW_TOKENS = 12
MIXES = ("llama", "gemma3", "gemma4 K = V", "gemma4 everything", "qwen3.5", "falcon-h1")
CHUNKS = (5, 16, WINDOW + 1, 4096)


@cache
def alone(name: str, start: tuple[int, ...], new_tokens: int) -> Run:
    return generate(name, [list(start)], new_tokens, Knobs(poison=False))


def assert_as_without(name: str, prompts: list[list[int]], knobs: Knobs) -> Run:
    """Run the prompts one after the other with restore points; logits and tokens are those of each run alone."""
    run = generate(name, prompts, NEW_TOKENS, knobs)
    for index, start in enumerate(prompts):
        without = alone(name, tuple(start), NEW_TOKENS)
        expected, computed = torch.stack(without.logits[0]), torch.stack(run.logits[index])
        same = [a == b for a, b in zip(run.outputs[index], without.outputs[0], strict=True)]
        parted_at = same.index(False) if False in same else NEW_TOKENS
        if parted_at < NEW_TOKENS:
            first, second = expected[parted_at].topk(2).values
            assert first - second <= 2e-4, f"token {parted_at} of prompt {index} differs although its margin is clear"
        assert (computed[:parted_at] - expected[:parted_at]).abs().max() <= 1e-4
    return run


def knobs(chunk_tokens: int, **more) -> Knobs:
    return Knobs(chunk_tokens=chunk_tokens, block_tokens=16, keep=True, one_by_one=True, **more)


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_message_ends_and_prompt_ends(name, chunk_tokens):
    stem = prompt(1, 70)
    prompts = [stem + prompt(2, 30), stem + prompt(3, 25), stem + prompt(2, 30), stem[:40] + prompt(4, 30)]
    run = assert_as_without(name, prompts, knobs(chunk_tokens, message_ends=(20, 40, 70)))
    # States are not kept at the end of the message between the first and the last one.
    expected = [0, 70, 100, 20 if name in WITH_STATES else 40]
    assert [r.cached_tokens for r in run.requests] == expected


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-h", "falcon-h1", "lfm2"])
def test_states_in_one_slot_are_overwritten_and_snapshots_are_not(name):
    """Prompts run together, beside sequences that decode, and one after another with all slots in use again."""
    stem = prompt(1, 70)
    prompts = [stem + prompt(seed, 30) for seed in (2, 3, 2, 4)]
    one_slot = knobs(4096, message_ends=(20, 70), state_slots=1)
    run = assert_as_without(name, prompts, one_slot)
    assert [r.cached_tokens for r in run.requests] == [0, 70, 100, 70]
    assert_as_without(name, prompts, replace(one_slot, one_by_one=False, room=2.2, num_slots=3))


@pytest.mark.parametrize("name", OTHERS)
def test_families_resume_as_they_began(name):
    stem = prompt(1, 70)
    prompts = [stem + prompt(2, 30), stem + prompt(3, 25), stem + prompt(2, 30)]
    run = assert_as_without(name, prompts, knobs(33, message_ends=(20, 70)))
    assert [r.cached_tokens for r in run.requests] == [0, 70, 100]


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_branches_that_lookups_discover(name, chunk_tokens):
    stem = prompt(1, 70)
    prompts = [stem + prompt(seed, 30) for seed in (2, 3, 4)]
    run = assert_as_without(name, prompts, knobs(chunk_tokens))
    assert [r.cached_tokens for r in run.requests] == ([0, 70, 70] if name == "llama" else [0, 0, 70])


@pytest.mark.parametrize("name", MIXES)
def test_ends_of_answers(name):
    first = prompt(1, 61)
    answer = alone(name, tuple(first), NEW_TOKENS).outputs[0]
    run = assert_as_without(name, [first, first + answer + prompt(2, 9)], knobs(64))
    assert [r.cached_tokens for r in run.requests] == [0, 61 + NEW_TOKENS - 1]


@pytest.mark.parametrize("name", MIXES)
def test_under_eviction_pressure(name):
    stems = [prompt(1, 50), prompt(2, 60)]
    prompts = [stems[i % 2] + prompt(10 + i % 4, 20 + i) for i in range(10)]
    run = assert_as_without(name, prompts, knobs(40, room=2.2, message_ends=(30, 50)))
    assert run.scheduler.cache_stats.evictions > 0
    assert run.scheduler.cache_stats.hits > 0


@pytest.mark.parametrize("name", MIXES)
def test_together_in_one_batch(name):
    stem = prompt(1, 70)
    prompts = [stem + prompt(seed % 3, 30) for seed in range(6)]
    assert_as_without(name, prompts, Knobs(chunk_tokens=40, num_slots=3, keep=True, message_ends=(70,)))


@pytest.mark.parametrize("name", MIXES)
def test_preempted_sequences(name):
    prompts = [prompt(seed, 10) for seed in range(1, 7)]
    run = generate(name, prompts, 70, Knobs(chunk_tokens=64, block_tokens=16, room=2.2, growth_tokens=4, keep=True))
    assert run.scheduler.preemptions > 0, "this test is about preemption"
    for start, output in zip(prompts, run.outputs, strict=True):
        assert output[:8] == alone(name, tuple(start), NEW_TOKENS).outputs[0][:8]


@pytest.mark.parametrize("name", ["gemma4 everything", "qwen3.5", "nemotron-h"])
def test_an_identical_prompt_runs_only_the_head(name):
    start = prompt(1, 90)
    run = generate(name, [start, start], 1, knobs(4096))
    assert run.requests[1].cached_tokens == 90
    assert torch.equal(run.logits[0][0], run.logits[1][0])


@pytest.mark.parametrize("name", [*MIXES, "qwen3-next", "gpt-oss"])
def test_sessions_that_went_to_the_host_and_came_back(name):
    """Everything is spilled at every step; three sessions on an arena that holds little more than one."""
    first = [prompt(seed, 61) for seed in (1, 2, 3)]
    answers = [alone(name, tuple(start), NEW_TOKENS).outputs[0] for start in first]
    second = [start + answer + prompt(9, 9) for start, answer in zip(first, answers, strict=True)]
    run = assert_as_without(name, first + second, knobs(33, room=2.0, host_room=12.0))
    assert [r.cached_tokens for r in run.requests] == [0] * 3 + [61 + NEW_TOKENS - 1] * 3
    assert run.scheduler.tier is not None and run.scheduler.tier.stats.fetches >= 2


@pytest.mark.parametrize("name", ["gemma3", "falcon-h1"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head"])
def test_coded_pages_come_back_as_they_went(name, kv_cache_dtype):
    first = [prompt(seed, 61) for seed in (1, 2, 3)]
    plain = Knobs(chunk_tokens=33, block_tokens=16, kv_cache_dtype=kv_cache_dtype, one_by_one=True)
    again = first + [start + prompt(9, 9) for start in first]
    without = generate(name, again, NEW_TOKENS, plain)
    run = generate(name, again, NEW_TOKENS, replace(plain, keep=True, room=2.0, host_room=12.0))
    assert run.outputs == without.outputs
    assert run.scheduler.tier is not None and run.scheduler.tier.stats.fetches >= 2


@pytest.mark.parametrize("name", ["gemma3", "qwen3.5"])
def test_preempted_requests_are_swapped(name):
    prompts = [prompt(seed, 10) for seed in range(1, 7)]
    swapping = Knobs(chunk_tokens=64, block_tokens=16, room=2.2, growth_tokens=4, keep=True, host_room=20.0)
    run = generate(name, prompts, 70, swapping)
    assert run.scheduler.preemptions > 0 and run.scheduler.tier is not None
    assert run.scheduler.tier.stats.fetches > 0
    for output, start in zip(run.outputs, prompts, strict=True):
        assert output[:8] == alone(name, tuple(start), NEW_TOKENS).outputs[0][:8]
