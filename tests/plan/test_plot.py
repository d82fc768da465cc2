"""Pictures of a plan: they are drawn, they say what the plan says, and a missing package is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from windowpane.cli import main as cli
from windowpane.models import load
from windowpane.plan.config import EngineConfig
from windowpane.plan.planner import make_plan
from windowpane.plan.plot import OURS, draw_plan, engines_of

GEMMA = ("gemma-4-31b", "--gpu", "h200", "--max-model-len", "131072")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["windowpane", "plan", *words])
    return cli.main()


def test_every_engine_has_a_line_and_a_bar_with_the_plan_s_own_figures() -> None:
    plan = make_plan(load("gemma-4-31b"), EngineConfig(max_model_len=131_072), gpu="h200")
    assert plan.capacity is not None
    engines = {engine.name: engine for engine in engines_of(plan)}
    assert list(engines) == [OURS, "vLLM 0.26+ async", "SGLang", "TensorRT-LLM V1", "llama.cpp"]
    assert sum(engines[OURS].kind_bytes.values()) == plan.capacity.bytes_at(131_072)
    assert engines[OURS].points[-1] == (131_072, plan.capacity.byte_ratio(131_072))
    vllm = next(peer for peer in plan.peers if peer.same_flags)
    assert sum(engines["vLLM 0.26+ async"].kind_bytes.values()) == vllm.bytes_per_request
    assert engines["vLLM 0.26+ async"].points[-1] == (131_072, vllm.concurrency)


def test_engines_whose_arithmetic_is_unknown_are_left_out() -> None:
    plan = make_plan(load("qwen3.5-27b"), EngineConfig(), gpu="h200")
    assert [engine.name for engine in engines_of(plan)] == [OURS, "vLLM 0.26+ async"]


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("gemma-4-31b", {"gpu": "h200"}),
        ("whisper-large-v3", {"gpu": "4090"}),
        ("mistral-7b-v0.1", {"gpu": "cpu", "gpu_memory_bytes": 64 * 2**30}),
    ],
)
def test_png_and_svg_are_drawn(tmp_path: Path, model: str, flags: dict[str, object]) -> None:
    plan = make_plan(load(model), EngineConfig(), **flags)  # type: ignore[arg-type]
    for ending, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"plan{ending}"
        draw_plan(plan, str(path))
        assert path.read_bytes().startswith(magic)
        assert path.stat().st_size > 10_000


def test_the_command_draws_and_still_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.svg"
    assert run(monkeypatch, *GEMMA, "--plot", str(path)) == 0
    captured = capsys.readouterr()
    assert "11 sequences of 131,072 tokens" in captured.out
    assert str(path) in captured.err
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*GEMMA, "--plot", "plan.jpg"), "PNG or SVG"),
        ((*GEMMA, "--plot", "no/such/place/plan.png"), "there is no directory"),
        (("gemma-4-31b", "--plot", "plan.png"), "--gpu or --kv-cache-memory-bytes"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert run(monkeypatch, *words) == 2
    assert said in capsys.readouterr().err


def test_without_matplotlib_the_command_to_type_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(monkeypatch, *GEMMA, "--plot", "plan.png") == 2
    assert "pip install 'windowpane[plot]'" in capsys.readouterr().err
