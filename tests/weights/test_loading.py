"""Hugging Face checkpoints: every tensor of the spec, under any usual prefix, or one error that lists why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.models.small_configs import SMALL, small
from windowpane.models import ModelSpec, load
from windowpane.models.weights import text_tensors
from windowpane.weights import WeightsError, checkpoint, load_weights, safetensors

CPU = torch.device("cpu")

# Their weights can be written by transformers itself, under the names it saves.
SAVED_BY_TRANSFORMERS = ["llama", "llama with biases", "gemma3 text", "gemma2", "qwen3", "qwen3 moe", "mistral"]


def spec_of(path: Path, config: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(config))
    return load(path)


def made_up(spec: ModelSpec, towers: bool = False) -> dict[str, torch.Tensor]:
    """A checkpoint for `spec`, as its file stores it."""
    generator = torch.Generator().manual_seed(0)
    tensors = spec.tensors if towers else text_tensors(spec)
    return {
        name: torch.randn(shape, generator=generator)
        for tensor in tensors
        for name, shape in tensor.checkpoint_entries()
    }


def read(path: Path, spec: ModelSpec, **options: Any) -> dict[str, torch.Tensor]:
    return load_weights(path, spec, **({"dtype": torch.float32, "device": CPU} | options))


@pytest.mark.parametrize("name", SAVED_BY_TRANSFORMERS)
def test_what_transformers_saves_is_loaded(name: str, tmp_path: Path) -> None:
    fields = small(name)
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    model = getattr(transformers, fields["architectures"][0])(config).to(torch.float32)
    model.save_pretrained(tmp_path)
    loaded = read(tmp_path, spec_of(tmp_path, fields))
    theirs = model.state_dict()
    plain = {key: value for key, value in loaded.items() if "{}" not in key}
    assert plain and all(torch.equal(value, theirs[key]) for key, value in plain.items())


@pytest.mark.parametrize("name", SMALL)
def test_every_family_loads_under_the_names_of_its_spec(name: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, SMALL[name])
    stored = made_up(spec, towers=True)
    save_file(stored, tmp_path / "model.safetensors")
    loaded = read(tmp_path, spec)
    assert {key: tuple(value.shape) for key, value in loaded.items()} == {t.name: t.shape for t in text_tensors(spec)}
    for tensor in text_tensors(spec):
        entries = [stored[entry] for entry, _ in tensor.checkpoint_entries()]
        assert torch.equal(loaded[tensor.name], torch.stack(entries) if tensor.stacked else entries[0])


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, SMALL["llama"])
    stored = made_up(spec)
    placed = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(stored)}
    for file in set(placed.values()):
        save_file({name: stored[name] for name in stored if placed[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    loaded = read(tmp_path, spec)
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"lacks model-1\.safetensors"):
        read(tmp_path, spec)


def test_an_index_that_lies_is_an_error(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, SMALL["llama"])
    save_file(made_up(spec), tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"ghost": "a.safetensors"}}))
    with pytest.raises(WeightsError, match=r"lacks ghost"):
        read(tmp_path, spec)


def test_tensors_are_converted(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, SMALL["llama"])
    stored = made_up(spec)
    save_file(stored, tmp_path / "model.safetensors")
    loaded = read(tmp_path, spec, dtype=torch.bfloat16)
    assert all(torch.equal(loaded[name], stored[name].to(torch.bfloat16)) for name in stored)


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", ["gemma3", "gemma3 text", "gemma4", "llama4"])
def test_any_of_the_usual_prefixes_is_read(name: str, prefix: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, SMALL[name])
    stored = made_up(spec)
    renamed = {
        (
            prefix + plain.removeprefix("model.") if (plain := checkpoint.plain_name(n)).startswith("model.") else plain
        ): t
        for n, t in stored.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    loaded = read(tmp_path, spec)
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[key], stored[key]) for key in stored)


def test_what_is_no_text_or_never_used_is_skipped(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, SMALL["gemma4 with shared KV"])
    shared = "model.language_model.layers.7.self_attn."
    extra = ["model.vision_tower.odd", "mtp.fc.weight", "model.embed_audio.odd", "lm_head.weight"]
    extra += [f"{shared}k_proj.weight", f"{shared}v_proj.weight", f"{shared}k_norm.weight"]
    extra += ["model.language_model.layers.0.self_attn.rotary_emb.inv_freq"]
    stored = made_up(spec)
    copy = {"lm_head.weight": stored["model.language_model.embed_tokens.weight"].clone()}
    save_file(stored | {name: torch.zeros(3) for name in extra} | copy, tmp_path / "model.safetensors")
    assert read(tmp_path, spec).keys().isdisjoint(extra)


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, SMALL["llama"])
    stored = made_up(spec)
    del stored["model.norm.weight"]
    stored["model.layers.1.mlp.up_proj.weight"] = torch.zeros(2, 3)
    stored["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        read(tmp_path, spec)
    lines = str(caught.value).splitlines()
    assert "(3 tensors)" in lines[0]
    assert sorted(line.strip() for line in lines[1:]) == [
        "misshapen: model.layers.1.mlp.up_proj.weight is [2, 3], not [128, 64]",
        "missing: model.norm.weight [64]",
        "unexpected: model.layers.9.mlp.up_proj.weight",
    ]


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, SMALL["llama"])
    save_file({"model.norm.weight": torch.zeros(64)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        read(tmp_path, spec)
    missing = len(text_tensors(spec)) - 1
    assert str(caught.value).count("missing:") == 20
    assert str(caught.value).endswith(f"… and {missing - 20} more")


def test_the_same_tensor_twice_is_an_error(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, SMALL["llama"])
    twice = {"model.language_model.norm.weight": torch.zeros(64)}
    save_file(made_up(spec) | twice, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="twice"):
        read(tmp_path, spec)


def test_a_head_is_missed_only_where_embeddings_are_not_tied(tmp_path: Path) -> None:
    tied = spec_of(tmp_path, small("llama", tie_word_embeddings=True))
    save_file(made_up(tied), tmp_path / "model.safetensors")
    assert "lm_head.weight" not in read(tmp_path, tied)
    untied = spec_of(tmp_path, small("llama", tie_word_embeddings=False))
    with pytest.raises(WeightsError, match=r"missing: lm_head\.weight"):
        read(tmp_path, untied)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_head_that_the_config_ties_must_be_the_embedding(prefix: str, tmp_path: Path) -> None:
    tied = spec_of(tmp_path, small("llama", tie_word_embeddings=True))
    stored = made_up(tied)
    head = stored["model.embed_tokens.weight"].clone()
    save_file(stored | {f"{prefix}lm_head.weight": head}, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in read(tmp_path, tied)
    head[-1, 3] += 1
    save_file(stored | {f"{prefix}lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_.*set it to false"):
        read(tmp_path, tied)
    save_file(stored | {f"{prefix}lm_head.weight": head[:-1]}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight is \[95, 64\].*set it to false"):
        read(tmp_path, tied)


@pytest.mark.parametrize(
    ("source", "load_format", "message"),
    [
        (None, "auto", "no weights are given"),
        ("nowhere", "auto", "no weights at nowhere"),
        (".", "pickle", "unknown load format 'pickle'; known: auto, safetensors, gguf, dummy"),
        (".", "auto", r"holds neither model\.safetensors nor model\.safetensors\.index\.json"),
    ],
)
def test_sources_that_cannot_be_read(
    source: str | None, load_format: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WeightsError, match=message):
        load_weights(
            source, spec_of(tmp_path, SMALL["llama"]), dtype=torch.float32, device=CPU, load_format=load_format
        )


def test_pieces_are_small_and_files_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(tmp_path, SMALL["llama"])
    stored = made_up(spec)
    save_file(stored, tmp_path / "model.safetensors")
    monkeypatch.setattr(safetensors, "PIECE_BYTES", 1000)
    monkeypatch.setattr(safetensors, "_REOPEN_BYTES", 3000)
    source = safetensors.SafetensorsCheckpoint(tmp_path)
    files = set()
    for name, tensor in stored.items():
        pieces = []
        for piece in source.pieces(name):
            assert piece.nbytes <= 1000
            pieces.append(piece)
            files.add(id(source._open_file))
        assert torch.equal(torch.cat(pieces), tensor)
    assert len(files) > 1


def test_progress_counts_bytes_up_to_the_end(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, SMALL["llama"])
    save_file(made_up(spec), tmp_path / "model.safetensors")
    calls: list[tuple[str, int, int]] = []
    loaded = read(tmp_path, spec, dtype=torch.bfloat16, progress=lambda *call: calls.append(call))
    total = sum(tensor.nbytes for tensor in loaded.values())
    assert [name for name, _, _ in calls] == list(loaded)
    assert {total_bytes for _, _, total_bytes in calls} == {total}
    done = [done_bytes for _, done_bytes, _ in calls]
    assert done == sorted(done) and done[-1] == total
