"""Adapters change answers exactly as merging them into the weights would, whoever shares their batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.running.adapters import RANK, merged, write_adapter
from tests.running.harness import Knobs, Run, generate_by, generate_with, host_slabs
from tests.running.small_models import spec_of, weights_of
from tests.running.test_against_transformers import prompt
from windowpane.kv.layout import Layout
from windowpane.models.adapters import AdapterError, AdapterRoom
from windowpane.models.tensors import ONLY_RANK
from windowpane.runners.plain import Runner
from windowpane.schedule.request import Request, Tokens
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
            dtype=torch.float32, adapter_room=room, host_slabs=host_slabs(layout, length, knobs),
            draft_tokens=knobs.drafts,
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


@pytest.mark.parametrize("knobs", [Knobs(adapter_slots=1), Knobs(adapter_slots=1, room=2.2, growth_tokens=4)])
def test_one_slot_serves_all_adapters_in_turn(knobs, tmp_path):
    """Requests wait for the slot, which the least recently used adapter leaves; preempted ones come back to theirs."""
    spec = spec_of("gemma3")
    deltas = [{}, *(write_adapter(tmp_path / str(seed), spec, seed) for seed in (1, 2))]
    knobs = replace(knobs, adapters=ADAPTERS, chunk_tokens=64, block_tokens=16)
    run = run_adapted("gemma3", [tmp_path / "1", tmp_path / "2"], PROMPTS, knobs)
    for i, adapter in enumerate(ADAPTERS):
        weights = merged(weights_of("gemma3"), deltas[adapter])
        alone = generate_with(spec, weights, [PROMPTS[i]], NEW_TOKENS, Knobs())
        assert_close(run.logits[i], alone.logits[0], run.outputs[i], alone.outputs[0])


@pytest.mark.parametrize(("room", "host_room"), [(8.0, 0.0), (2.0, 20.0)])
def test_what_is_kept_of_a_prompt_is_its_adapters_alone(room, host_room, tmp_path):
    """The same prompt with and without adapters, one after another: each finds only what it left itself, also where
    that has gone to the host.
    """
    spec = spec_of("gemma3")
    deltas = [{}, *(write_adapter(tmp_path / str(seed), spec, seed) for seed in (1, 2))]
    adapters = (0, 1, 2, 0, 1, 2)
    knobs = Knobs(adapters=adapters, adapter_slots=2, keep=True, one_by_one=True, message_ends=(40,))
    knobs = replace(knobs, room=room, host_room=host_room)
    run = run_adapted("gemma3", [tmp_path / "1", tmp_path / "2"], [prompt(1, 70)] * len(adapters), knobs)
    assert [request.cached_tokens > 0 for request in run.requests] == [False] * 3 + [True] * 3
    assert run.scheduler.tier is None or run.scheduler.tier.stats.fetches >= 2
    for i, adapter in enumerate(adapters):
        weights = merged(weights_of("gemma3"), deltas[adapter])
        alone = generate_with(spec, weights, [prompt(1, 70)], NEW_TOKENS, Knobs())
        assert_close(run.logits[i], alone.logits[0], run.outputs[i], alone.outputs[0])


def test_drafts_are_verified_by_the_adapter(tmp_path):
    """Drafts of adapted sequences, which layers in one call would take as rows: the same answers, in fewer steps."""
    write_adapter(tmp_path / "1", spec_of("gemma3"), 1)
    knobs = Knobs(adapters=(1, 0, 1), adapter_slots=1)
    plain = run_adapted("gemma3", [tmp_path / "1"], PROMPTS[:3], knobs)

    def guess(request: Request, room: int) -> Tokens:
        known = plain.outputs[int(request.id)][len(request.output) : len(request.output) + room]
        return np.array(known, dtype=np.int32)

    run = run_adapted("gemma3", [tmp_path / "1"], PROMPTS[:3], replace(knobs, drafts=3, guess=guess))
    assert run.accepted_drafts > NEW_TOKENS
    for i in range(3):
        assert_close(run.logits[i], plain.logits[i], run.outputs[i], plain.outputs[i])


@pytest.mark.parametrize("name", ["llama int4", "qwen3 fp8"])
def test_packed_weights_take_adapters(name, tmp_path):
    """What an adapter adds does not depend on how the weights are held: against the same weights, widened."""
    spec = spec_of(name)
    deltas = write_adapter(tmp_path / "1", spec, 1)
    knobs = Knobs(adapters=(1, 0), adapter_slots=1)
    run = run_adapted(name, [tmp_path / "1"], PROMPTS[:2], knobs)
    widened = {
        key: weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)
        for key, weight in weights_of(name).items()
    }
    plain = replace(spec, quantization=None)
    for i, added in enumerate((deltas, {})):
        alone = generate_with(plain, merged(dict(widened), added), [PROMPTS[i]], NEW_TOKENS, Knobs())
        assert_close(run.logits[i][:1], alone.logits[0][:1], run.outputs[i][:1], alone.outputs[0][:1])


class TestFiles:
    """Whatever does not fit is one error that names it."""

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"use_dora": True}, "use_dora True is not run"),
            ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not run"),
            ({"bias": "all"}, "bias 'all' is not run"),
            ({"peft_type": "IA3"}, "peft_type 'IA3' is not run"),
            ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
            ({"r": 0}, "r is 0, not a number above 0"),
            ({"rank_pattern": {"q_(": 4}}, "rank_pattern is .* not numbers by patterns"),
            ({"r": 8}, r"lora_A.weight is \[4, 64\], not \[8, 64\]"),
        ],
    )
    def test_configs(self, tmp_path, config, message):
        write_adapter(tmp_path, spec_of("llama"), 1, **config)
        with pytest.raises(AdapterError, match=message):
            read(tmp_path)

    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            ("model.layers.0.self_attn.q_proj.lora_A", (RANK, 63), r"q_proj.lora_A.weight is \[4, 63\], not \[4, 64\]"),
            ("model.layers.9.self_attn.q_proj.lora_A", (RANK, 64), "layers.9.self_attn.q_proj.* has no lora_B"),
            ("model.layers.0.mlp.gate.lora_A", None, "model.layers.0.mlp.gate is no projection of a layer of llama"),
            ("lm_head.lora_A", None, "lm_head is no projection"),
            ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", (64,), "is no lora_A or lora_B"),
        ],
    )
    def test_tensors(self, tmp_path, name, shape, message):
        write_adapter(tmp_path, spec_of("llama"), 1, base_model_name_or_path="other/model")
        file = tmp_path / "adapter_model.safetensors"
        tensors = load_file(file)
        tensors[f"base_model.model.{name}.weight"] = torch.zeros(shape or (RANK, 64))
        if shape is None:
            tensors[f"base_model.model.{name.replace('lora_A', 'lora_B')}.weight"] = torch.zeros(64, RANK)
        save_file(tensors, file)
        with pytest.raises(AdapterError, match=message):
            read(tmp_path)

    def test_what_there_is_no_room_for(self, tmp_path):
        write_adapter(tmp_path, spec_of("llama"), 1, only=("o_proj",))
        with pytest.raises(AdapterError, match=r"o_proj has rank 4, .* room for 2: .*--max-lora-rank 4"):
            read(tmp_path, AdapterRoom(1, 2))
        with pytest.raises(AdapterError, match="o_proj is not among --lora-target-modules q_proj"):
            read(tmp_path, AdapterRoom(1, RANK, ("q_proj",)))
        assert read(tmp_path, AdapterRoom(1, RANK, ("o_proj",))).keys() == read(tmp_path).keys()

    def test_no_files(self, tmp_path):
        with pytest.raises(AdapterError, match="holds no adapter_config"):
            read(tmp_path)
        (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}')
        (tmp_path / "adapter_model.bin").touch()
        with pytest.raises(AdapterError, match=r"holds adapter_model.bin; .*adapter_model.safetensors"):
            read(tmp_path)

    def test_ranks_and_strengths_by_module(self, tmp_path):
        """PEFT's patterns, and rsLoRA's square root."""
        spec = spec_of("llama")
        fields = {"r": 8, "rank_pattern": {"o_proj": RANK}, "lora_alpha": 1, "alpha_pattern": {"layers.0.*o_proj": 6}}
        write_adapter(tmp_path, spec, 1, only=("o_proj",), **fields, use_rslora=True)
        stored = load_file(tmp_path / "adapter_model.safetensors")
        found = read(tmp_path, AdapterRoom(1, 8))
        for layer, alpha in ((0, 6), (1, 1)):
            (((pair),),) = found[f"model.layers.{layer}.self_attn.o_proj.weight"]
            b = stored[f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_B.weight"]
            assert torch.allclose(pair.b, b * alpha / RANK**0.5)


def read(path: Path, room: AdapterRoom | None = None) -> dict[str, Any]:
    return read_adapter(path, spec_of("llama"), room or AdapterRoom(1, RANK), ONLY_RANK)
