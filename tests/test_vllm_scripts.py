"""Start scripts as people have published them for models that run here, with `vllm` changed to `windowpane`.

Each is read up to where a model would be loaded: its flags make a config of the engine and options of the server.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import windowpane.server.run as server
from tests.tiny_model import make_model
from windowpane.cli import main as cli
from windowpane.engine.find import find_model
from windowpane.engine.options import StartOptions, read_flags
from windowpane.plan.config import ConfigError, EngineConfig

HTTP = "--host 0.0.0.0 --port 8000"
# With what their flags came to: of the model, the engine and the server.
SCRIPTS: dict[str, dict[str, Any]] = {
    f"google/gemma-3-4b-it --served-model-name google/gemma-3-4b-it {HTTP} --gpu-memory-utilization 0.9 "
    "--tensor-parallel-size 1 --max-model-len 16384 --dtype bfloat16 --trust-remote-code": {
        "max_model_len": 16384, "dtype": "bfloat16", "served_model_names": ("google/gemma-3-4b-it",),
    },
    f"--model google/gemma-2-9b-it --gpu-memory-utilization 1.0 --tensor-parallel-size 4 {HTTP}": {
        "model": "google/gemma-2-9b-it", "tensor_parallel_size": 4, "host": "0.0.0.0",
    },
    "/models/gemma-3-12b-it --host localhost --port 8787 --gpu-memory-utilization 0.95 --tensor-parallel-size 1 "
    "--pipeline-parallel-size 1 --max-model-len 8192 --max-num-seqs 50 --dtype=bfloat16 --served-model-name gemma": {
        "max_num_seqs": 50, "port": 8787,
    },
    "google/gemma-3-27b-it --max-num-seqs 64 --max-model-len 52768 -tp 4 -pp 1 --gpu-memory-utilization 0.97": {
        "tensor_parallel_size": 4, "max_model_len": 52768,
    },
    "google/gemma-2-9b-it --dtype half -tp 8 --gpu_memory_utilization 0.95 --download_dir /models --swap-space 0": {
        "dtype": "float16", "gpu_memory_utilization": 0.95, "download_dir": "/models",
    },
    "openai/gpt-oss-20b --gpu-memory-utilization 0.2 --max-num-seqs 128 --enable-chunked-prefill "
    "--disable-log-requests": {
        "log_level": "warning",
    },
    "--model /models/qwen3-30b-a3b --host 127.0.0.1 --port 8003 --served-model-name qwen3 --trust-remote-code "
    "--max-model-len 65536 --dtype auto --enable-auto-tool-choice --tool-call-parser hermes": {
        "model": "/models/qwen3-30b-a3b", "served_model_names": ("qwen3",),
    },
    "--port 8000 --model Qwen/Qwen3-32B-AWQ --max-model-len 40960 --quantization awq_marlin --enable-auto-tool-choice "
    "--tool-call-parser hermes --limit-mm-per-prompt '{\"image\": 0}'": {
        "model": "Qwen/Qwen3-32B-AWQ", "quantization": "awq_marlin",
    },
    "--model=/mnt/models/ --download-dir=/models-cache --port=8080 --distributed-executor-backend=mp "
    "--tensor-parallel-size=2 --max-model-len=2048 --enable-chunked-prefill --gpu-memory-utilization=0.95": {
        "model": "/mnt/models/", "port": 8080, "download_dir": "/models-cache",
    },
    "google/gemma-4-31B-it --revision abc --tokenizer-revision abc --served-model-name gemma4 --dtype bfloat16 "
    "--tensor-parallel-size 2 --generation-config vllm --override-generation-config "
    "'{\"temperature\": 1.0, \"top_k\": 64}' --reasoning-parser gemma4 "
    "--default-chat-template-kwargs '{\"enable_thinking\": false}'": {
        "revision": "abc",
        "sampling_overrides": {"temperature": 1.0, "top_k": 64},
        "template_variables": {"enable_thinking": False},
    },
    "openai/gpt-oss-120b --enable-auto-tool-choice --gpu-memory-utilization 0.7 --kv-cache-memory-bytes 17179869184 "
    "--max-num-seqs 1 --no-enable-prefix-caching --reasoning-parser openai_gptoss --tool-call-parser openai": {
        "kv_cache_memory_bytes": 2**34, "enable_prefix_caching": False,
    },
    "--model meta-llama/Llama-3.1-8B-Instruct --enable-lora --lora-modules medical=/a/medical legal=/a/legal "
    f"--max-loras 16 --max-lora-rank 64 {HTTP} --gpu-memory-utilization 0.90 --dtype auto --trust-remote-code": {
        "lora_modules": {"medical": "/a/medical", "legal": "/a/legal"}, "max_loras": 16,
    },
    "openai/gpt-oss-120b --port 8017 --tensor_parallel_size 4 --data_parallel_size 1 --served_model_name rerank": {
        "tensor_parallel_size": 4, "served_model_names": ("rerank",),
    },
    "/w/Qwen3-235B-A22B-FP8 --served-model-name=q --kv-cache-dtype fp8 --allow-credentials --trust-remote-code "
    "--max-num-seqs=64 --tensor-parallel-size=4 --enable-reasoning --reasoning-parser deepseek_r1": {
        "kv_cache_dtype": "fp8",
    },
    "Qwen/Qwen3-14B --tokenizer Qwen/Qwen3-14B --max-model-len auto --no-enable-log-requests --disable-log-stats": {
        "max_model_len": None, "log_level": "warning",
    },
}  # fmt: skip
# With the flag that they have to do without, and what is said of it.
REFUSED = {
    "Qwen/Qwen3-30B-A3B --tensor-parallel-size 4 --enable-expert-parallel": "--enable-expert-parallel",
    "openai/gpt-oss-20b --hf-overrides '{\"quantization_config\": {}}'": "--hf-overrides",
    "Qwen/Qwen3-32B --tensor-parallel-size 8 --pipeline-parallel-size 4": "--pipeline-parallel-size",
    "--model coder.Q4_K_M.gguf --tokenizer Qwen/Qwen2.5-Coder-7B --load-format gguf": "--tokenizer",
    "google/gemma-4-E4B-it --limit-mm-per-prompt '{\"image\": 4}' --trust-remote-code": "--limit-mm-per-prompt",
    "google/gemma-3-4b-it --no-enable-chunked-prefill": "--no-enable-chunked-prefill",
    "google/gemma-3-4b-it --block-size 128 --num-gpu-blocks-override 6": "--block-size",
    "google/gemma-3-4b-it --model google/gemma-3-12b-it": "--model google/gemma-3-12b-it; leave one out",
}

Run = tuple[str | None, StartOptions, EngineConfig, server.ServerOptions]


def run(monkeypatch: pytest.MonkeyPatch, script: str) -> tuple[int, Run | None]:
    found: list[Run] = []

    def take(model: str | None, flags: dict[str, Any], options: server.ServerOptions) -> int:
        found.append((model, *read_flags(flags), options))
        return 0

    monkeypatch.setattr(server, "serve", take)
    monkeypatch.setattr(sys, "argv", ["windowpane", "serve", *shlex.split(script)])
    return cli.main(), found[0] if found else None


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_start_script_is_taken_with_one_word_changed(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    code, found = run(monkeypatch, script)
    assert code == 0 and found is not None
    model, *parts = found
    named = next(word for word in shlex.split(script.replace("--model", "").replace("=", " ")) if "/" in word)
    assert model == named
    values = {name: getattr(part, name) for part in parts for name in dir(part) if not name.startswith("_")}
    expected = {"model": model, **SCRIPTS[script]}
    assert {name: {**values, "model": model}[name] for name in expected} == expected


@pytest.mark.parametrize("script", REFUSED)
def test_what_it_has_to_do_without_is_said_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    code, found = run(monkeypatch, script)
    err = capsys.readouterr().err
    assert code == 2 and found is None and REFUSED[script] in err and err.count("\n") == 1


def test_a_checkpoint_is_run_as_it_is_quantized(tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    plain, quantized = make_model(tmp_path / "plain"), make_model(tmp_path / "awq", quantization_config=awq)
    for name in ("awq", "awq_marlin"):
        assert find_model(quantized, StartOptions(quantization=name))[1] == quantized
    with pytest.raises(ConfigError, match=r"--quantization fp8: .* is quantized by awq, and weights are run as they"):
        find_model(quantized, StartOptions(quantization="fp8"))
    with pytest.raises(ConfigError, match=r"--quantization bitsandbytes: .* is not quantized"):
        find_model(plain, StartOptions(quantization="bitsandbytes", load_format="bitsandbytes"))


def test_vllms_variable_names_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    _, found = run(monkeypatch, "google/gemma-3-4b-it")
    assert found is not None and found[3].access.api_keys == ("secret",)
