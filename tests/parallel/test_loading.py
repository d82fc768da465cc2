"""Ranks read their parts of a checkpoint: together they hold it, and each holds what the plan counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.models.test_gguf import GEMMA3, LLAMA, write_gguf
from tests.parallel.checkpoints import SCHEMES, quantized_spec, write_checkpoint
from tests.parallel.ranks import CPU
from tests.running.small_models import CONFIGS, spec_of
from tests.weights.test_gguf_weights import BLOCK, GEMMA_NORMS, made_up
from windowpane.lowering.packed import PackedWeight
from windowpane.models import ModelSpec, from_config, load, shipped_names
from windowpane.models.tensors import RankPlace, Shard
from windowpane.models.weights import sharding_problem, text_tensors, weight_bytes
from windowpane.weights import LoadedWeights, load_weights
from windowpane.weights import safetensors as safetensors_module
from windowpane.weights.safetensors import SafetensorsCheckpoint

RANKS = (2, 4)


def read(spec: ModelSpec, source: Path | None, place: RankPlace) -> LoadedWeights:
    load_format = "auto" if source else "dummy"
    return load_weights(source, spec, dtype=torch.float32, device=CPU, load_format=load_format, seed=3, place=place)


def values(weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float32)


def check_parts(spec: ModelSpec, source: Path | None, ranks: int) -> None:
    """Each rank's tensors are the parts of the whole that the spec gives it, and as many bytes as the plan counts."""
    whole = read(spec, source, RankPlace(0, 1))
    covered = {name: torch.zeros(weight.shape, dtype=torch.bool) for name, weight in whole.items()}
    for rank in range(ranks):
        place = RankPlace(rank, ranks)
        parts = read(spec, source, place)
        assert sum(part.nbytes for part in parts.values()) == weight_bytes(spec, ranks)
        for tensor in text_tensors(spec):
            expected, cut = values(whole[tensor.name]), tensor.cut(place)
            if cut is None:
                covered[tensor.name][:] = True
            else:
                index = torch.cat([torch.arange(some.start, some.stop) for some in cut.ranges])
                expected = expected.index_select(cut.axis, index)
                covered[tensor.name].index_fill_(cut.axis, index, True)
            assert torch.equal(values(parts[tensor.name]), expected), tensor.name
            assert tensor.on_rank(ranks).shape == parts[tensor.name].shape
    assert all(bool(mask.all()) for mask in covered.values()), "a part of the model is on no rank"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_safetensors(scheme: str, tmp_path: Path) -> None:
    spec = quantized_spec(scheme)
    check_parts(spec, write_checkpoint(spec, tmp_path / "m"), 2)


def test_heads_that_ranks_share(tmp_path: Path) -> None:
    """Two KV heads on four ranks: each is on two of them."""
    spec = spec_of("llama with biases")
    check_parts(spec, write_checkpoint(spec, tmp_path / "m"), 4)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["gemma4 everything", "llama int4", "gemma4 int4"])
def test_random_weights_are_those_of_one_rank(name: str, ranks: int) -> None:
    check_parts(spec_of(name), None, ranks)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gguf(family: str, tmp_path: Path) -> None:
    parts, header = {"llama": (BLOCK, LLAMA), "gemma3": (BLOCK | GEMMA_NORMS, GEMMA3)}[family]
    path = write_gguf(tmp_path / "m.gguf", family, header, made_up(parts))
    check_parts(replace(load(path), dtype="float32"), path, 2)


def test_small_pieces_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = quantized_spec("awq")
    path = write_checkpoint(spec, tmp_path / "m")
    monkeypatch.setattr(safetensors_module, "PIECE_BYTES", 1000)
    check_parts(spec, path, 2)


def test_a_rank_reads_no_more_than_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that come out of the file: those of the tensors that are cut come in halves."""
    spec = quantized_spec("int4 symmetric")
    path = write_checkpoint(spec, tmp_path / "m")
    read_bytes = [0]
    pieces = SafetensorsCheckpoint.pieces

    def counting(self: SafetensorsCheckpoint, *arguments: object) -> object:
        for piece in pieces(self, *arguments):  # type: ignore[arg-type]
            read_bytes[0] += piece.nbytes
            yield piece

    monkeypatch.setattr(SafetensorsCheckpoint, "pieces", counting)
    read(spec, path, RankPlace(1, 2))
    with safe_open(path / "model.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    small = sum(t.nbytes for name, t in stored.items() if "norm" in name or "weight_shape" in name)
    assert read_bytes[0] == (sum(t.nbytes for t in stored.values()) - small) // 2 + small


class TestWhatCannotBeCut:
    def test_inputs_that_are_sorted_by_group(self) -> None:
        scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
        spec = from_config({**CONFIGS["qwen3"], "quantization_config": scheme}, "sorted")
        problem = sharding_problem(spec, 2)
        assert problem and "self_attn.o_proj.weight" in problem and "use a checkpoint without that" in problem

    def test_groups_that_ranks_would_cut_through(self) -> None:
        scheme = {"quant_method": "awq", "bits": 4, "group_size": 128}
        spec = from_config({**CONFIGS["qwen3"], "hidden_size": 128, "quantization_config": scheme}, "coarse")
        problem = sharding_problem(spec, 2)
        assert problem and "64 values per rank cut through quantization groups of 128" in problem

    def test_blocks_of_fp8(self) -> None:
        problem = sharding_problem(spec_of("qwen3 fp8"), 2)
        assert problem and "k_proj" in problem


@pytest.mark.parametrize("name", [n for n in shipped_names() if load(n).quantization])
def test_what_a_rank_reads_is_what_its_part_is_stored_as(name: str) -> None:
    spec = load(name)
    quantization = spec.quantization
    assert quantization is not None
    assert sharding_problem(spec, 2) is None
    for tensor in text_tensors(spec):
        apart = [(p.name, p.on_rank(2).shape) for p in quantization.stored(tensor)]
        assert apart == [(p.name, p.shape) for p in quantization.stored(tensor.on_rank(2))]


@given(
    sections=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 3, 4, 6, 8, 12])), min_size=1, max_size=3),
    ranks=st.integers(1, 8),
)
def test_ranges_share_out_every_section_evenly(sections: list[tuple[int, int]], ranks: int) -> None:
    shard = Shard(0, tuple((each * units, units) for each, units in sections))
    if not shard.fits(ranks):
        return
    held = [[i for some in shard.ranges(RankPlace(rank, ranks)) for i in some] for rank in range(ranks)]
    assert {len(some) for some in held} == {shard.rank_length(ranks)}
    counts = np.bincount(np.concatenate(held), minlength=sum(length for length, _ in shard.sections))
    first = 0
    for length, units in shard.sections:
        assert set(counts[first : first + length]) == {max(1, ranks // units)}
        first += length
