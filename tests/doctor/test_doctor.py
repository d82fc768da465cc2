"""Logs as people paste them: the figures come out exactly, failures are known, and silence is answered with a list."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from windowpane.cli import main as cli
from windowpane.doctor.diagnosis import Diagnosis, diagnose
from windowpane.doctor.log import LogError, LogFacts, Rounded, read_log
from windowpane.models import ModelError

LOGS = Path(__file__).parent / "logs"
GIB = 2**30


def text_of(name: str) -> str:
    return (LOGS / f"{name}.log").read_text("utf-8")


def facts_of(text: str) -> LogFacts:
    """The facts of a text with one start."""
    (start,) = read_log(text).starts
    return start.facts


def diagnosed(name: str, **given: Any) -> Diagnosis:
    return diagnose(text_of(name), LogFacts(**given))


def levers(found: Diagnosis) -> dict[str, tuple[str, int | None]]:
    return {
        lever.what: (
            f"{lever.report.concurrency:.2f}" if lever.report.concurrency else "–",
            lever.report.reported_tokens,
        )
        for lever in found.levers
    }


class TestReadingLogs:
    def test_every_fact_of_a_serving_log(self) -> None:
        facts = facts_of(text_of("gemma-4-31b-two-3090s"))
        assert facts == LogFacts(
            version="0.20.0",
            model="google/gemma-4-31B-it",
            dtype="bfloat16",
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            max_model_len=131_072,
            max_num_batched_tokens=2048,
            kv_cache_dtype="auto",
            enable_prefix_caching=True,
            speculative_tokens=0,
            gpu_memory_utilization=0.95,
            available_kv=Rounded("11.54 GiB", 12_385_611_939, 12_396_349_357),
            reported_tokens=25_200,
            concurrency="1.87",
        ), "the smaller of the two ranks' memory counts"

    def test_a_printed_size_stands_for_all_that_round_to_it(self) -> None:
        facts = facts_of("Available KV cache memory: 64.74 GiB")
        assert facts.available_kv is not None
        assert facts.available_kv.low <= 69_510_103_040 <= facts.available_kv.high
        assert facts.available_kv.high - facts.available_kv.low == pytest.approx(0.01 * GIB, abs=4)

    def test_colours_prefixes_and_wrapped_lines_do_not_hide_facts(self) -> None:
        wrapped = (
            "\x1b[36m(EngineCore pid=3)\x1b[0m INFO 06-11 16:20:51 [core.py:110] Available KV cache\n"
            "(EngineCore pid=3) memory: 5.02 GiB\n[rank0]: ValueError: KV cache size:\n[rank0]: 1,024 tokens"
        )
        facts = facts_of(wrapped)
        assert facts.available_kv and facts.available_kv.text == "5.02 GiB"
        assert facts.reported_tokens == 1024

    def test_async_scheduling_and_states_are_found(self) -> None:
        assert facts_of(text_of("gemma-4-31b-h200")).async_scheduling is True
        assert facts_of("Asynchronous scheduling is disabled.").async_scheduling is False
        assert facts_of("non-default args: {'mamba_cache_mode': 'all'}").mamba_cache_mode == "all"
        assert facts_of(text_of("routed-experts")).block_tokens == 1056
        assert facts_of(text_of("fp8e4nv")).gpu == "NVIDIA GeForce RTX 3090"

    def test_a_text_that_is_no_log_gets_the_list_of_what_was_looked_for(self) -> None:
        with pytest.raises(LogError) as error:
            diagnose("hello world", LogFacts())
        for part in ("GPU KV cache size", "Available KV cache memory", "fp8e4nv", "max_num_batched_tokens"):
            assert part in str(error.value)


class TestFigures:
    def test_25_200_tokens_on_two_3090s(self) -> None:
        found = diagnosed("gemma-4-31b-two-3090s")
        explained = found.explanation
        assert explained is not None and explained.exact and explained.assumed == ()
        assert (explained.report.version, explained.report.reported_tokens) == ("0.20.0", 25_200)
        assert [(g.layers, g.block_tokens) for g in explained.report.groups] == [(10, 16)] * 5 + [(10, 32)]
        assert found.capacity is not None
        assert f"{found.capacity.byte_ratio(131_072):.2f}" == "3.98"

    def test_237_057_tokens_on_an_h200(self) -> None:
        found = diagnosed("gemma-4-31b-h200")
        assert found.explanation is not None and found.explanation.exact
        assert found.explanation.report.num_blocks == 26_516, "the log's 64.74 GiB are 69,510,103,040 bytes"
        changes = levers(found)
        assert changes["--no-async-scheduling"] == ("2.78", 364_270)
        assert changes["--max-num-batched-tokens 2048"] == ("4.65", 609_630)

    def test_the_jump_from_54_608_to_530_400_is_the_log_line_alone(self) -> None:
        before, after = (diagnosed(f"gemma-4-31b-awq-a100-{version}") for version in ("0.20.0", "0.21.0"))
        assert before.explanation and after.explanation and before.explanation.exact and after.explanation.exact
        assert before.explanation.report.num_blocks == after.explanation.report.num_blocks == 20_480
        assert before.explanation.report.concurrency == after.explanation.report.concurrency
        assert levers(before)["vLLM 0.25.0"] == ("4.05", 530_400)
        assert levers(after)["vLLM 0.20.0"] == ("4.05", 54_608)

    def test_what_the_log_leaves_out_is_found_by_what_fits(self) -> None:
        """Without version, step and mode only one combination gives 237,057 tokens and 1.81 requests."""
        kept = ("Available KV", "KV cache size", "Maximum concurrency")
        lines = [line for line in text_of("gemma-4-31b-h200").splitlines() if any(word in line for word in kept)]
        found = diagnose("\n".join(lines), LogFacts(model="gemma-4-31b"))
        assert found.explanation is not None and found.explanation.exact
        assert found.explanation.assumed == (
            "vLLM 0.26+",
            "tensor_parallel_size 1",
            "max_num_batched_tokens 16,384",
            "async scheduling",
        )

    def test_figures_that_no_rule_gives_are_not_explained_away(self) -> None:
        found = diagnose(text_of("gemma-4-31b-h200").replace("237,057", "237,000"), LogFacts())
        assert found.unexplained and found.explanation is None and found.levers == ()
        assert any("no release's formula" in doubt for doubt in found.doubts)

    def test_options_win_over_the_log(self) -> None:
        found = diagnosed("too-small", max_num_batched_tokens=2048)
        assert found.explanation is not None
        assert found.explanation.setting.max_num_batched_tokens == 2048


class TestFailures:
    @pytest.mark.parametrize(
        ("log", "key", "said"),
        [
            ("page-size", "page_size_not_divisible", "window-1024 133,120 B, full 66,048 B"),
            ("fp8e4nv", "fp8e4nv_not_supported", "8.9"),
            ("fp8-e5m2", "fp8_e5m2_with_quantized_checkpoint", "every quantized one, INT4"),
            ("too-small", "kv_cache_too_small", "8.52 GiB"),
            ("routed-experts", "routed_experts_out_of_bounds", "it needs 2,096,160 rows"),
        ],
    )
    def test_known_failures_have_causes_and_ways_out(self, log: str, key: str, said: str) -> None:
        (failure,) = diagnosed(log).failures
        assert failure.key == key
        assert said in failure.cause
        assert len(failure.ways_out) >= 3

    def test_too_small_agrees_with_vllm_about_the_length_that_fits(self) -> None:
        found = diagnosed("too-small")
        assert found.explanation is not None and found.explanation.report.error is not None
        assert "39,264" in found.explanation.report.error
        assert any("--max-model-len 39264" in way for way in found.failures[0].ways_out)

    def test_an_index_error_elsewhere_is_not_blamed_on_routed_experts(self) -> None:
        text = "vLLM API server version 0.20.0\nIndexError: index 5 is out of bounds for axis 0 with size 4"
        assert diagnose(text, LogFacts()).failures == ()

    def test_a_healthy_log_has_none(self) -> None:
        assert diagnosed("gemma-4-31b-h200").failures == ()


class TestModels:
    @pytest.mark.parametrize(
        ("name", "shipped"),
        [
            ("google/gemma-4-31B-it", "gemma-4-31b"),
            ("RedHatAI/gemma-4-31B-it-FP8-Dynamic", "gemma-4-31b"),
            ("unsloth/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
            ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ],
    )
    def test_repositories_are_recognised(self, name: str, shipped: str) -> None:
        found = diagnosed("gemma-4-31b-h200", model=name, max_model_len=4096)
        assert found.spec is not None and found.spec.name == shipped

    def test_a_failure_is_explained_whatever_the_model_and_dtype(self) -> None:
        for model, dtype in (("nobody/unheard-of-9000B", "fp8"), ("google/gemma-4-31B-it", "nvfp4")):
            found = diagnosed("fp8e4nv", model=model, kv_cache_dtype=dtype)
            assert [failure.key for failure in found.failures] == ["fp8e4nv_not_supported"]
            assert found.spec is None and len(found.doubts) == 1

    def test_an_unknown_model_says_what_to_give(self) -> None:
        with pytest.raises(ModelError, match=r"unheard-of-9000B is not in the cache .* give a directory"):
            diagnosed("gemma-4-31b-h200", model="nobody/unheard-of-9000B")


class TestCommand:
    def run(self, monkeypatch: pytest.MonkeyPatch, *words: str, stdin: str = "") -> int:
        monkeypatch.setattr(sys, "argv", ["windowpane", "doctor", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return cli.main()

    @pytest.mark.parametrize("log", sorted(path.stem for path in LOGS.glob("*.log")))
    def test_every_log_is_explained_without_anything_cut_off(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log: str
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        assert self.run(monkeypatch, str(LOGS / f"{log}.log")) == 0
        out = capsys.readouterr().out
        assert "What the log says" in out and "What the model needs" in out
        assert all(len(line) <= 80 and "…" not in line for line in out.splitlines())

    def test_stdin_and_json(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(monkeypatch, "-", "--json", stdin=text_of("gemma-4-31b-h200")) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["exact"], document["vllm"]["reported_tokens"]) == (True, 237_057)
        described = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")
        assert all(f"`{field}`" in described for field in document)

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("-",), "Looked for"),
            (("no-such.log",), "cannot read the log no-such.log"),
            (("-", "--vllm-version", "new"), "write it as in 0.26.0"),
        ],
    )
    def test_what_cannot_be_read_is_one_error(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
    ) -> None:
        stdin = text_of("gemma-4-31b-h200") if len(words) > 1 else "good morning"
        assert self.run(monkeypatch, *words, stdin=stdin) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and said in captured.err
