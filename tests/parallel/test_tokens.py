"""Two ranks say what one does, and hold what the plan says: every family, every knob of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from tests.parallel.checkpoints import SCHEMES, quantized_spec, twin_config, write_checkpoint
from tests.parallel.ranks import RANKS, Model, assert_same
from tests.running.harness import Knobs
from tests.running.small_models import CONFIGS, WINDOW
from tests.running.test_against_transformers import prompt
from tests.weights.gguf_files import write
from windowpane.models import from_config, load
from windowpane.parallel.launch import Workers

MIXES = ("llama", "gemma4 everything")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("name", [*CONFIGS, "llama int4", "gemma4 int4", "qwen3 experts int4", "gpt-oss mxfp4"])
def test_every_family(name: str, workers: Workers, directory: Path) -> None:
    model = Model.named(name, directory)
    prompts = [prompt(1, 2 * WINDOW + 5), prompt(2, 9)]
    knobs = Knobs(chunk_tokens=40, poison=False)
    assert_same(model.on_ranks(workers, prompts, 16, knobs), model.alone(prompts, 16, knobs))


@pytest.mark.parametrize("name", ["qwen35", "qwen3next", "granite hybrid", "falcon-h1"])
def test_states_of_gguf_files(name: str, workers: Workers, tmp_path: Path) -> None:
    """Whose value heads lie in another order, and ranks hold those of their key heads."""
    write(tmp_path / "m.gguf", name, gguf.GGMLQuantizationType.F32)
    model = Model(replace(load(tmp_path / "m.gguf"), dtype="float32"), tmp_path / "m.gguf")
    prompts, knobs = [prompt(1, 2 * WINDOW + 5), prompt(2, 9)], Knobs(chunk_tokens=40, poison=False)
    assert_same(model.on_ranks(workers, prompts, 16, knobs), model.alone(prompts, 16, knobs))


def test_fewer_kv_heads_than_ranks(workers: Workers, tmp_path: Path) -> None:
    spec = from_config({**CONFIGS["qwen3"], "num_key_value_heads": 1, "tie_word_embeddings": True}, "one KV head")
    model = Model(spec, write_checkpoint(spec, tmp_path / "one"))
    assert {cache.shard(RANKS).kv_heads for cache in spec.token_caches} == {1}
    knobs = Knobs(chunk_tokens=40, poison=False)
    prompts = [prompt(1, 60)]
    assert_same(model.on_ranks(workers, prompts, 16, knobs), model.alone(prompts, 16, knobs))


def test_preemption(workers: Workers, directory: Path) -> None:
    model = Model.named("gemma4 everything", directory)
    prompts = [prompt(seed, 10) for seed in range(1, 5)]
    knobs = Knobs(chunk_tokens=64, block_tokens=16, room=1.6, growth_tokens=4, poison=False)
    run = model.on_ranks(workers, prompts, 40, knobs)
    assert run.scheduler.preemptions > 0, "this test is about preemption"
    assert_same(run, model.alone(prompts, 40, Knobs(poison=False)))


@pytest.mark.parametrize("name", MIXES)
def test_restore_points(name: str, workers: Workers, directory: Path) -> None:
    model = Model.named(name, directory)
    stem = prompt(1, 70)
    prompts = [stem + prompt(2, 30), stem + prompt(3, 25), stem + prompt(2, 30), stem[:40] + prompt(4, 30)]
    knobs = Knobs(
        chunk_tokens=WINDOW + 1, block_tokens=16, keep=True, one_by_one=True, message_ends=(20, 40, 70), poison=False
    )
    run = model.on_ranks(workers, prompts, 12, knobs)
    assert [r.cached_tokens for r in run.requests] == [0, 70, 100, 40]
    assert_same(run, model.alone(prompts, 12, Knobs(poison=False)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_checkpoints(scheme: str, workers: Workers, tmp_path: Path) -> None:
    spec = quantized_spec(scheme)
    model = Model(spec, write_checkpoint(spec, tmp_path / "quantized"))
    knobs = Knobs(poison=False)
    prompts = [prompt(1, 40)]
    assert_same(model.on_ranks(workers, prompts, 8, knobs), model.alone(prompts, 8, knobs))


def test_the_twin_of_the_headline(workers: Workers, tmp_path: Path) -> None:
    """Gemma 4 31B in int4, smaller: bytes are checked by `on_ranks`, per rank and against the plan."""
    spec = from_config(twin_config(), "twin")
    model = Model(spec, write_checkpoint(spec, tmp_path / "twin"))
    prompts = [prompt(1, 3 * WINDOW + 5), prompt(2, 30)]
    knobs = Knobs(chunk_tokens=50, poison=False)
    run = model.on_ranks(workers, prompts, 24, knobs)
    assert_same(run, model.alone(prompts, 24, knobs))
    assert len(set(run.outputs[0])) > 5, "a model that echoes a few tokens proves little"
