"""Every KV format on every shipped layout starts: pages are laid out, and a token's rows go in and come out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.running.small_models import CONFIGS, spec_of, weights_of
from windowpane.device.pages import KVPages, LayerPages
from windowpane.engine.start import start
from windowpane.kv.caches import TokenCache
from windowpane.kv.formats import FORMATS
from windowpane.kv.retention import Cross
from windowpane.models import ModelSpec, load, shipped_names
from windowpane.plan.config import EngineConfig
from windowpane.plan.planner import PlanError, make_plan, size_up
from windowpane.schedule.request import Request, SamplingParams
from windowpane.schedule.step import Segment, Step
from windowpane.weights import load_kv_scales, load_weights

CPU = torch.device("cpu")
CODED = [name for name, fmt in FORMATS.items() if fmt.family != "float"]
CHUNK = (Segment(0, 0, 3, 0, 0, 3),)
FIRST_TOKENS = Step(np.zeros(3, np.int32), np.arange(3), np.zeros(0, np.int64), CHUNK, CHUNK, np.arange(3))
MOST_ERROR = {"int8_per_token_head": 0.02, "fp8_per_token_head": 0.05, "fp8_e4m3": 0.05}


def pages_of(spec: ModelSpec, kv_cache_dtype: str) -> KVPages:
    layout = size_up(spec, EngineConfig(kv_cache_dtype=kv_cache_dtype), 1, on_cpu=True).layout
    return KVPages(layout, 1, 1, 64, CPU)


@pytest.mark.parametrize("kv_cache_dtype", CODED)
@pytest.mark.parametrize("name", shipped_names())
def test_rows_of_every_shipped_layout_survive_every_format(name, kv_cache_dtype):
    torch.manual_seed(0)
    pages = pages_of(load(name), kv_cache_dtype)
    for index, group in enumerate(pages.layout.groups):
        for piece in (group.slices[0], group.slices[-1]):
            if not isinstance(piece.cache, TokenCache) or isinstance(group.retention, Cross):
                continue
            layer = LayerPages(pages, index, piece)
            rows = [torch.randn(3, piece.cache.kv_heads, dim) for dim in piece.cache.row_dims]
            layer.layer_scales = [0.02] * len(rows)
            if layer.warming_up:
                layer.end_warm_up()
            layer.write(FIRST_TOKENS, rows)
            for stored, row in zip(layer.past(0, 0, 3), rows, strict=True):
                error = (stored.transpose(0, 1) - row).norm() / row.norm()
                assert 0 < error < MOST_ERROR.get(kv_cache_dtype, 0.2)


def test_head_tokens_of_520_and_1032_bytes_stand_side_by_side():
    """Gemma 4's windows and full layers with a scale per token and head: neither size divides the other."""
    spec = load("gemma-4-e4b")
    for group in pages_of(spec, "int8_per_token_head").layout.groups:
        for piece in group.slices:
            head_token_bytes = sum(piece.row_bytes) + 4 * len(piece.scale_offsets)
            assert head_token_bytes == (1032 if group.grows else 520)
    assert make_plan(spec, EngineConfig(kv_cache_dtype="int8_per_token_head"), gpu="h200").capacity is not None


def test_e4m3_is_decoded_in_software_on_sm_8_6():
    gates = make_plan(load("gemma-3-4b"), EngineConfig(kv_cache_dtype="fp8_e4m3"), gpu="3090").gates
    assert {gate.verdict for gate in gates.values()} == {"software"}


def test_e5m2_on_an_int4_checkpoint():
    plan = make_plan(load("gemma-4-31b-awq-4bit"), EngineConfig(kv_cache_dtype="fp8_e5m2"), gpu="h200")
    assert all("int4 weights do not matter" in gate.why for gate in plan.gates.values())


def saved(tmp_path: Path, name: str, extra: dict[str, torch.Tensor]) -> Path:
    """A small model as a Hugging Face directory."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    weights = {key: tensor.contiguous() for key, tensor in weights_of(name).items()}
    save_file(weights | extra, tmp_path / "model.safetensors")
    return tmp_path


def test_calibrated_scales_are_read_from_the_checkpoint(tmp_path):
    scales = {f"model.layers.{i}.self_attn.{kv}_scale": torch.tensor(0.25 + i) for i in (0, 1) for kv in "kv"}
    scales["model.layers.2.self_attn.k_scale"] = torch.tensor([0.5])  # without V's it says nothing
    path = saved(tmp_path, "llama", scales)
    assert load_kv_scales(path, spec_of("llama")) == {0: (0.25, 0.25), 1: (1.25, 1.25)}
    assert load_weights(path, spec_of("llama"), dtype=torch.float32, device=CPU), "scales are no weights"
    assert load_kv_scales(path, spec_of("llama"), "dummy") == {}


@pytest.mark.parametrize("choice", [*CODED, "full=int8_per_token_head,window=fp8_e4m3"])
def test_the_engine_starts_and_answers(tmp_path, choice):
    path = saved(tmp_path, "gemma4 K = V", {})
    started = start(path, {"kv_cache_dtype": choice, "kv_cache_memory_bytes": 2**24, "max_num_seqs": 2})
    stored = {g.kv_format.name for g in started.plan.sizing.layout.groups}
    assert stored == {part.rpartition("=")[2] for part in choice.split(",")}
    request = Request("a", np.arange(5, 40), SamplingParams(max_tokens=4, temperature=0))
    started.engine.add(request)
    while started.engine.has_work:
        started.engine.step()
    assert len(request.output) == 4


def test_fit_makes_room_and_slots_for_what_it_names(tmp_path):
    flags = {"kv_cache_memory_bytes": 2**19, "max_num_seqs": 2, "block_tokens": 16, "slab_bytes": 2**15}
    started = start(saved(tmp_path, "gemma3", {}), {**flags, "fit": "4x256"})
    assert {g.kv_format.name for g in started.plan.sizing.layout.groups} != {"float32"}
    assert started.engine.manager.tables[0].entries.shape[0] == 4 and started.plan.max_model_len == 256
    for index in range(4):
        tokens = np.arange(5, 250) % CONFIGS["gemma3"]["vocab_size"]
        started.engine.add(Request(str(index), tokens, SamplingParams(max_tokens=4, temperature=0)))
    while started.engine.has_work:
        started.engine.step()
    assert started.engine.scheduler.preemptions == 0


def test_a_conflicting_scheme_is_refused_with_the_planners_words():
    spec = load("gemma-4-31b-awq-4bit")
    scheme = replace(spec, quantization=replace(spec.quantization, kv_cache_scheme="fp8_e4m3"))
    with pytest.raises(PlanError, match=r"fp8_e5m2 for .*calibrated for fp8_e4m3.*use auto or fp8_e4m3"):
        make_plan(scheme, EngineConfig(kv_cache_dtype="fp8_e5m2"), gpu="h200")
