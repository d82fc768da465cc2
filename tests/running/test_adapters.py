"""Adapters change answers exactly as merging them into the weights would, whoever shares their batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.running.adapters import RANK, merged, write_adapter
from tests.running.harness import Knobs, Run, generate_by, generate_with
from tests.running.small_models import spec_of, weights_of
from tests.running.test_against_transformers import prompt
from windowpane.kv.layout import Layout
from windowpane.models.adapters import AdapterRoom
from windowpane.models.tensors import ONLY_RANK
from windowpane.runners.plain import Runner
from windowpane.weights.adapters import read_adapter

NEW_TOKENS = 12
FAMILIES = (
    "llama", "gemma3", "qwen3", "phi3", "mistral small 3", "gemma4 K = V", "gemma4 everything",
    "qwen3 experts", "gemma4 experts", "gpt-oss", "llama 4", "qwen3-next", "falcon-h1", "lfm2",
)  # fmt: skip
PROMPTS = [prompt(seed, tokens) for seed, tokens in ((1, 40), (2, 5), (3, 33), (4, 40), (5, 20))]
ADAPTERS = (1, 0, 2, 2, 1)


def run_adapted(name: str, paths: list[Path], prompts: list[list[int]], knobs: Knobs) -> Run:
    """Adapter n of a prompt is the n-th of `paths`."""
    spec, room = spec_of(name), AdapterRoom(knobs.adapter_slots, RANK)

    def make_runner(layout: Layout, slabs: int, length: int) -> Runner:
        runner = Runner(
            spec, weights_of(name), layout, slabs, knobs.num_slots, length, device=torch.device("cpu"),
            dtype=torch.float32, adapter_room=room,
        )  # fmt: skip
        assert runner.adapters is not None
        for number, path in enumerate(paths, start=1):
            runner.adapters.know(number, runner.adapters.arranged(read_adapter(path, spec, room, ONLY_RANK)))
        return runner

    return generate_by(make_runner, list(spec.caches), prompts, NEW_TOKENS, knobs)


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], tokens: list[int], others: list[int]) -> None:
    assert tokens == others
    assert (torch.stack(found) - torch.stack(wanted)).abs().max() <= 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_merged_weights(name, tmp_path):
    """Two adapters and the base model in one batch, in chunks of 17 tokens."""
    spec, weights = spec_of(name), weights_of(name)
    deltas = [{}, *(write_adapter(tmp_path / str(seed), spec, seed) for seed in (1, 2))]
    knobs = Knobs(adapters=ADAPTERS, adapter_slots=2, chunk_tokens=17)
    run = run_adapted(name, [tmp_path / "1", tmp_path / "2"], PROMPTS, knobs)
    plain = generate_with(spec, weights_of(name), PROMPTS, NEW_TOKENS, Knobs())
    for adapter in (0, 1, 2):
        mine = [i for i, number in enumerate(ADAPTERS) if number == adapter]
        alone = generate_with(spec, merged(weights, deltas[adapter]), [PROMPTS[i] for i in mine], NEW_TOKENS, Knobs())
        for at, i in enumerate(mine):
            assert_close(run.logits[i], alone.logits[at], run.outputs[i], alone.outputs[at])
            difference = (run.logits[i][0] - plain.logits[i][0]).abs().max()
            assert difference > 0.01 if adapter else difference <= 1e-4, "the adapter hardly does anything"
