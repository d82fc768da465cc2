"""`LLM(tensor_parallel_size=2)`: what it says, what it prints, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.checkpoints import twin_config, write_checkpoint
from tests.running.test_against_transformers import prompt
from windowpane import LLM, SamplingParams
from windowpane.engine.accounts import accounts
from windowpane.engine.start import start
from windowpane.models import load

FLAGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",  # else rows are rounded to 8 bits, which sums of two ranks, in another order, may tip over
    "kv_cache_memory_bytes": 8 * 2**20,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}
PROMPTS = [prompt(1, 100), prompt(2, 20)]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scaled-down twin of Gemma 4 31B in int4, as a directory to start from."""
    path = tmp_path_factory.mktemp("models") / "twin"
    config = tmp_path_factory.mktemp("configs") / "twin.json"
    config.write_text(json.dumps(twin_config()))
    write_checkpoint(load(config), path)
    config.rename(path / "config.json")
    return path


@pytest.fixture(scope="module")
def parallel(twin: Path) -> Iterator[LLM]:
    with LLM(twin, tensor_parallel_size=2, async_scheduling=True, **FLAGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(twin: Path) -> LLM:
    return LLM(twin, **FLAGS)


def test_greedy_drawn_and_prompt_logprobs_are_those_of_one_rank(parallel: LLM, alone: LLM) -> None:
    params = [
        SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=2, logprobs=3),
        SamplingParams(max_tokens=8, temperature=1.0, seed=3, top_p=0.9),
    ]
    for ours, theirs in zip(parallel.generate(PROMPTS, params), alone.generate(PROMPTS, params), strict=True):
        assert ours.token_ids == theirs.token_ids
        for logprobs in ("prompt_logprobs", "logprobs"):
            own, expected = getattr(ours, logprobs) or [], getattr(theirs, logprobs) or []
            pairs = [(a.logprob, b.logprob) for a, b in zip(own, expected, strict=True) if a is not None]
            assert all(a == pytest.approx(b, abs=1e-4) for a, b in pairs)
    parallel.engine.manager.check_idle()


def test_the_books_of_every_rank_are_the_plan(twin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    started = start(twin, {**FLAGS, "tensor_parallel_size": 2}, Console(stderr=True, width=100))
    try:
        assert len(started.reports) == 2
        for row in accounts(started.plan, started.reports):
            assert row.rank_bytes == (row.predicted_bytes,) * 2, row.name
    finally:
        started.close()
    said = capsys.readouterr().err
    assert "2 ranks of this CPU" in said and "rank 1" in said


def test_each_rank_spills_and_fetches_its_own_part(twin: Path, alone: LLM) -> None:
    tight = {**FLAGS, "kv_cache_memory_bytes": 2**19, "kv_offloading_size": "64MiB"}
    greedy = SamplingParams(max_tokens=8, temperature=0)
    prompts = [prompt(seed, 100) for seed in range(5)]
    with LLM(twin, tensor_parallel_size=2, **tight) as llm:
        first = llm.generate(prompts, greedy)
        longer = [completion.prompt_token_ids + completion.token_ids for completion in first]
        second, expected = llm.generate(longer, greedy), alone.generate(longer, greedy)
        assert [c.token_ids for c in second] == [c.token_ids for c in expected]
        tier = llm.engine.scheduler.tier
        assert tier is not None and tier.stats.fetches > 0


def test_the_parts_of_all_ranks_come_back_from_disk_or_none_does(twin: Path, alone: LLM, tmp_path: Path) -> None:
    """A file has the pages of both ranks: where those of one are damaged, the other's are not used either."""
    flags = {**FLAGS, "kv_offloading_size": "64MiB", "kv_disk_path": str(tmp_path), "tensor_parallel_size": 2}
    greedy = SamplingParams(max_tokens=8, temperature=0)
    with LLM(twin, **flags) as llm:
        first = llm.generate(PROMPTS[:1], greedy)[0]
    longer = [first.prompt_token_ids + first.token_ids]
    (expected,) = alone.generate(longer, greedy)
    for damaged, found in ((False, 107), (True, 0)):
        for file in tmp_path.glob("*.kv") if damaged else ():
            data = bytearray(file.read_bytes())
            data[-100] ^= 1  # the last page is the last rank's
            file.write_bytes(data)
        with LLM(twin, **flags) as llm:
            (again,) = llm.generate(longer, greedy)
            assert (again.token_ids, again.cached_tokens) == (expected.token_ids, found)
            tier = llm.engine.scheduler.tier
            assert tier is not None and (tier.stats.disk_hit_tokens > 0) == (found > 0)
