"""A GGUF file's header amounts to the Hugging Face config of the same model."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from bench import generated_gguf
from windowpane.cli.main import main
from windowpane.engine.devices import on_gpu, resolve_plan
from windowpane.models import ModelError, load
from windowpane.models.embedded import embedded_path
from windowpane.models.ggml import GGML_TYPES
from windowpane.models.gguf import read_header
from windowpane.models.gguf_families import hf_config, tensors_by_hf_name
from windowpane.plan.config import ConfigError, EngineConfig
from windowpane.plan.planner import make_plan
from windowpane.text import load_tokenizer
from windowpane.weights import load_weights

LLAMA: dict[str, Any] = {
    "block_count": 2,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "context_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
GEMMA3 = {**LLAMA, "attention.key_length": 16, "attention.sliding_window": 8}


def write_gguf(
    path: Path,
    architecture: str,
    fields: dict[str, Any],
    tensors: dict[str, np.ndarray] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """One file, or several of at most `split_max_tensors` tensors, as llama.cpp's own writer names them."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    for key, value in fields.items():
        name = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{key}"
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}[
            type(value)
        ]
        add(name, value)
    for name, tensor in ({"token_embd.weight": np.zeros((96, 64), np.float32)} | (tensors or {})).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_embedded_gemma_is_the_shipped_model() -> None:
    ours, shipped = load(embedded_path("gemma-3-270m")), load("gemma-3-270m")
    assert ours.weight_scheme == "GGUF (Q8_0 + Q5_0)"
    assert replace(ours.expanded(), name=shipped.name, notes=shipped.notes) == shipped


def test_the_embedded_gemma_says_how_to_run() -> None:
    config = hf_config(read_header(embedded_path("gemma-3-270m")))
    expected = {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    assert {key: config[key] for key in expected} == expected
    assert "rope_scaling" not in config


def test_the_embedded_smollm2_is_a_llama() -> None:
    path = embedded_path("smollm2-135m-instruct")
    spec, config = load(path), hf_config(read_header(path))
    assert (spec.family, spec.num_layers, spec.query_heads, spec.hidden_size) == ("llama", 30, 9, 576)
    assert {cache.kv_heads for cache in spec.token_caches} == {3}
    assert (config["rope_theta"], config["rms_norm_eps"], config["hidden_act"]) == (100_000.0, 1e-5, "silu")
    assert config["tie_word_embeddings"] is True


def test_the_generated_benchmark_file_has_the_tensors_of_the_real_one() -> None:
    real = read_header(embedded_path("gemma-3-270m")).tensors.values()
    assert {(t.name, GGML_TYPES[t.kind].scheme, t.shape) for t in real} == set(generated_gguf.tensors())


def test_a_generated_benchmark_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_gguf, "VOCAB", 512)
    generated_gguf.write(tmp_path / "m.gguf")
    spec = load(tmp_path / "m.gguf")
    weights = load_weights(tmp_path / "m.gguf", spec, dtype=torch.float32, device=torch.device("cpu"))
    assert (spec.num_layers, spec.vocab_size, len(weights)) == (18, 512, len(list(generated_gguf.tensors())))
    assert load_tokenizer(tmp_path / "m.gguf").id_count == 512


def test_gemma_3_27b_scales_queries_by_its_width(tmp_path: Path) -> None:
    fields = {**GEMMA3, "block_count": 62, "embedding_length": 96}
    assert hf_config(read_header(write_gguf(tmp_path / "m.gguf", "gemma3", fields)))["query_pre_attn_scalar"] == 24


def test_an_output_matrix_means_untied_embeddings(tmp_path: Path) -> None:
    head = {"output.weight": np.zeros((96, 64), np.float32)}
    assert "lm_head.weight" in {t.name for t in load(write_gguf(tmp_path / "m.gguf", "llama", LLAMA, head)).tensors}


def test_linear_rope_scaling_is_read(tmp_path: Path) -> None:
    fields = {**GEMMA3, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config = hf_config(read_header(write_gguf(tmp_path / "m.gguf", "gemma3", fields)))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def llama3_factors(theta: float, factor: float, count: int) -> np.ndarray:
    """As llama.cpp's converter writes them."""
    out = []
    for index in range(count):
        wavelength = 2 * math.pi * theta ** (index / count)
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192 / 1:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_rope_scaling_is_recovered_from_its_factors(tmp_path: Path, factor: float) -> None:
    fields = {**LLAMA, "attention.key_length": 128, "rope.freq_base": 500_000.0}
    factors = {"rope_freqs.weight": llama3_factors(500_000.0, factor, 64)}
    config = hf_config(read_header(write_gguf(tmp_path / "m.gguf", "llama", fields, factors)))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    with pytest.raises(ModelError, match=r"rope_freqs\.weight.*Hugging Face directory"):
        load(write_gguf(tmp_path / "m.gguf", "llama", LLAMA, factors))


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("mamba", LLAMA, "architecture 'mamba' are not read; those that are: falcon-h1, gemma2, gemma3"),
        ("llama", {**LLAMA, "split.count": 3}, "one of 3 parts"),
        ("llama", {**LLAMA, "rope.scaling.type": "ntk"}, "unknown value 'ntk'; known: linear, yarn, none"),
        ("llama", {**LLAMA, "rope.dimension_count": 8}, "rotates 8 of 16 dimensions"),
        ("llama", {**LLAMA, "block_count": "two"}, "llama.block_count must be a whole number, not 'two'"),
        ("llama", {**LLAMA, "rope.freq_base": float("nan")}, "llama.rope.freq_base must be a number, not nan"),
        ("llama", {k: v for k, v in LLAMA.items() if k != "block_count"}, "no num_hidden_layers"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, architecture: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(write_gguf(tmp_path / "m.gguf", architecture, fields))


QWEN35: dict[str, Any] = {
    **LLAMA,
    "attention.key_length": 16,
    "rope.dimension_count": 4,
    "full_attention_interval": 2,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 6,
    "ssm.inner_size": 96,
}


def test_layers_that_draft_are_passed_over(tmp_path: Path) -> None:
    """llama.cpp's converter counts a model's multi-token layers among its blocks."""
    drafting = {
        "blk.2.attn_q.weight": np.zeros((128, 64), np.float32),
        "blk.2.nextn.enorm.weight": np.zeros(64, np.float32),
    }
    plain = write_gguf(tmp_path / "plain.gguf", "qwen35", QWEN35)
    path = write_gguf(tmp_path / "m.gguf", "qwen35", QWEN35 | {"block_count": 3, "nextn_predict_layers": 1}, drafting)
    assert load(path).decoder == load(plain).decoder
    assert tensors_by_hf_name(read_header(path)).keys() == tensors_by_hf_name(read_header(plain)).keys()


def test_recurrent_states_of_a_file_are_those_of_its_sizes(tmp_path: Path) -> None:
    spec = load(write_gguf(tmp_path / "m.gguf", "qwen35", QWEN35))
    (state,) = spec.state_caches
    assert {part.name: part.heads for part in state.parts} == {"conv_q": 2, "conv_k": 2, "conv_v": 6, "recurrent": 6}
    assert (state.part("recurrent").elements_per_head, state.part("recurrent").dtype) == (16 * 16, "float32")
    assert [cache.layer for cache in spec.token_caches] == [1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.group_count": None}, r"m.gguf has no qwen35.ssm.group_count"),
        ({"ssm.time_step_rank": 0, "ssm.state_size": None}, r"has no qwen35.ssm.state_size, qwen35.ssm.time_step_rank"),
        ({"ssm.inner_size": 97}, r"ssm.inner_size is 97, no multiple of ssm.time_step_rank, 6"),
        ({"ssm.group_count": 4}, r"linear_num_value_heads is 6, no multiple of linear_num_key_heads, 4"),
        ({"nextn_predict_layers": 2}, "num_hidden_layers"),
    ],
)
def test_sizes_of_states_that_cannot_be_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fields = {key: value for key, value in (QWEN35 | changes).items() if value is not None}
    with pytest.raises(ModelError, match=message):
        load(write_gguf(tmp_path / "m.gguf", "qwen35", fields))


NEMOTRON_H: dict[str, Any] = {
    **{key: value for key, value in LLAMA.items() if "head_count_kv" not in key and "feed_forward" not in key},
    "attention.key_length": 16,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}


@pytest.mark.parametrize(
    ("kv_heads", "widths", "message"),
    [
        ([0, 2], [], "must have a number for each of 2 layers"),
        ([0, 2, 4], [128, 0, 0], r"head_count_kv must be one number but for zeros, not \[2, 4\]"),
    ],
)
def test_layers_of_nemotron_h_are_told_by_their_numbers(
    tmp_path: Path, kv_heads: list[int], widths: list[int], message: str
) -> None:
    arrays = {"attention.head_count_kv": kv_heads} | ({"feed_forward_length": widths} if widths else {})
    with pytest.raises(ModelError, match=message):
        load(write_gguf(tmp_path / "m.gguf", "nemotron_h", NEMOTRON_H | arrays))


@pytest.mark.parametrize("kept", [8, 30, 200])
def test_a_file_that_is_cut_short_is_an_error(tmp_path: Path, kept: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"m\.gguf"):
        load(path)


def test_an_unknown_version_is_an_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA)
    data = path.read_bytes()
    path.write_bytes(data[:4] + (1).to_bytes(4, "little") + data[8:])
    with pytest.raises(ModelError, match="GGUF version 1"):
        load(path)


def test_tensors_lie_where_the_reference_reader_finds_them(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": np.ones((3, 64), np.float16), "output_norm.weight": np.ones(5, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA, tensors)
    theirs = {t.name: (tuple(reversed(t.shape.tolist())), t.data_offset) for t in gguf.GGUFReader(path).tensors}
    assert {t.name: (t.shape, t.offset) for t in read_header(path).tensors.values()} == theirs


TENSORS = {f"blk.0.ffn_{part}.weight": np.ones((3, 64), np.float16) for part in ("gate", "up", "down")}


def test_a_model_in_several_files_is_read_as_a_whole_whichever_is_named(tmp_path: Path) -> None:
    whole = load(write_gguf(tmp_path / "whole.gguf", "llama", LLAMA, TENSORS))
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, TENSORS, split_max_tensors=2)
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert [file.name for file in files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    for file in files:
        header = read_header(file)
        assert list(header.tensors) == ["token_embd.weight", *TENSORS]
        assert {t.file.name for t in header.tensors.values()} == {f.name for f in files}
        spec = load(file)
        assert spec.weight_scheme == "GGUF (F16)"
        assert replace(spec, name=whole.name) == whole


def test_a_missing_or_foreign_shard_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, TENSORS, split_max_tensors=1)
    first, second, third, fourth = sorted(tmp_path.glob("m-*.gguf"))
    data = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match=r"m-00003-of-00004.gguf and m-00002-of-00004.gguf both hold blk"):
        load(first)
    second.write_bytes(data)
    third.unlink()
    fourth.unlink()
    with pytest.raises(ModelError, match=r"m-00001-of-00004.gguf is one of 4 parts, and .* lacks m-00003.* and 1 more"):
        load(first)


def test_the_report_names_the_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(embedded_path("gemma-3-270m"))
    monkeypatch.setattr(sys, "argv", ["windowpane", "plan", path, "--gpu", "4090"])
    monkeypatch.setenv("COLUMNS", "100")
    assert main() == 0
    out, _ = capsys.readouterr()
    assert "18 layers, GGUF (Q8_0 + Q5_0) weights, computes in bfloat16" in out
    assert re.search(r"weights +0\.23 GiB +of the GGUF file, as it stores them", out)


def test_weights_are_counted_as_they_are_held() -> None:
    """Packed as in the file, which has the tokenizer besides; expanded where that is asked for."""
    path = embedded_path("gemma-3-270m")
    config = EngineConfig(max_model_len=1024)
    plan = make_plan(load(path), config, gpu="4090")
    # Q8_0, Q5_0 and Q6_K take what they take in the file, Q4_K 148 bytes for 144, and norms the dtype of the rest.
    matrices = 179_824_640 + 43_591_680 + 9_676_800 + 13_271_040 // 144 * 148
    assert plan.budget is not None and plan.budget.weights_bytes == matrices + 223_744 // 2 < path.stat().st_size
    assert any("0.24 GiB; CPUs run it as it is stored, GPUs with --dtype" in note for note in plan.sizing.spec.notes)
    as_stored, expanded = (
        resolve_plan(load(path), config, [torch.device("cpu")], dtype) for dtype in ("auto", "float32")
    )
    assert as_stored.sizing.weights_bytes == matrices + 223_744
    assert expanded.sizing.weights_bytes == 4 * 268_098_176


def test_gpus_expand_a_file_only_when_they_are_told_to() -> None:
    spec = load(embedded_path("gemma-3-270m"))
    with pytest.raises(
        ConfigError, match=r"stored as GGUF \(Q8_0 \+ Q5_0\), which GPUs do not read; --dtype bfloat16 exp"
    ):
        on_gpu(spec, "auto")
    assert on_gpu(spec, "float16").quantization is None


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA)
    assert load(path).num_layers == 2
    write_gguf(path, "llama", {**LLAMA, "block_count": 3, "general.name": "longer"})
    assert load(path).num_layers == 3


def test_reading_a_gguf_model_needs_neither_torch_nor_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", LLAMA)
    code = f"import sys, windowpane.models as m; m.load({str(path)!r}); print({{'torch', 'gguf'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
