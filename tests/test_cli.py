"""The command line as its users meet it: figures, the JSON document, the report and one-line errors."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.models.small_configs import small
from windowpane import __version__
from windowpane.cli import main as cli
from windowpane.models import ModelError, load, shipped_names
from windowpane.models.running import runnable
from windowpane.plan.sizes import format_bytes
from windowpane.text.parsers import REASONING_PARSERS, TOOL_PARSERS

Run = tuple[int, str, str]
STORY = ("gemma-4-31b", "--max-model-len", "131072")
TP2 = (*STORY, "--tensor-parallel-size", "2", "--kv-cache-memory-bytes", "11.54GiB")
H200_KV = (*STORY, "--kv-cache-memory-bytes", "64.74GiB")


class Terminal:
    """Types a command and reads what comes back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)

    def run(self, *words: str, columns: int = 80) -> Run:
        self.monkeypatch.setenv("COLUMNS", str(columns))
        self.monkeypatch.setattr(sys, "argv", ["windowpane", *words])
        self.capsys.readouterr()
        code = cli.main()
        out, err = self.capsys.readouterr()
        return code, out, err

    def report(self, *words: str, columns: int = 80) -> str:
        code, out, err = self.run("plan", *words, columns=columns)
        assert (code, err) == (0, "")
        return out

    def document(self, *words: str) -> dict[str, Any]:
        document = json.loads(self.report(*words, "--json"))
        assert isinstance(document, dict)
        return document


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(monkeypatch, capsys)


def peer(document: dict[str, Any], version: str, async_scheduling: bool | None = None) -> dict[str, Any]:
    (found,) = (
        p
        for p in document["peers"]
        if p["version"] == version and p["async_scheduling"] in (None, async_scheduling) and not p["alternative"]
    )
    return dict(found)


class TestFigures:
    """The worked examples, from what is typed to what is printed."""

    def test_gemma_4_31b_on_two_3090s(self, terminal: Terminal) -> None:
        document = terminal.document(*TP2, "--max-num-batched-tokens", "2048")
        old = peer(document, "0.20.0")
        assert (old["reported_tokens"], f"{old['concurrency']:.2f}") == (25_200, "1.87")
        assert document["concurrency"] >= 3.9

    def test_the_jump_of_the_log_line(self, terminal: Terminal) -> None:
        document = terminal.document(*STORY, "--kv-cache-memory-bytes", "50GiB", "--max-num-batched-tokens", "2048")
        assert peer(document, "0.20.0")["num_blocks"] == 20_480
        assert peer(document, "0.20.0")["reported_tokens"] == 54_608
        assert peer(document, "0.25.0")["reported_tokens"] == 530_400

    def test_gemma_4_31b_on_an_h200(self, terminal: Terminal) -> None:
        flags = ("--kv-cache-memory-bytes", "69510103040", "--max-num-batched-tokens", "16384")
        newest = peer(terminal.document(*STORY, *flags), "0.26.0", True)
        assert newest["num_blocks"] == 26_516
        assert (newest["reported_tokens"], f"{newest['concurrency']:.2f}") == (237_057, "1.81")

    def test_what_fits_here(self, terminal: Terminal) -> None:
        for flags, at_least in ((H200_KV, 11.0), (TP2, 3.9)):
            assert terminal.document(*flags)["concurrency"] >= at_least
            int8 = terminal.document(*flags, "--kv-cache-dtype", "int8_per_token_head")
            assert int8["concurrency"] >= 1.9 * at_least

    def test_figures_are_in_the_report_too(self, terminal: Terminal) -> None:
        report = terminal.report(*TP2, "--max-num-batched-tokens", "2048")
        assert "3 sequences of 131,072 tokens" in report
        assert "25,200 tokens" in report and "1.87×" in report


NUMBER = (int, float)
DOCUMENT: dict[str, Any] = {
    "schema_version": int,
    "model": str,
    "architecture": str,
    "device": str,
    "tensor_parallel_size": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "async_scheduling": bool,
    "enable_prefix_caching": bool,
    "kv_cache_dtype": str,
    "mamba_ssm_cache_dtype": str,
    "swa_full": bool,
    "speculative_config": dict,
    "rollback_tokens": int,
    "compute_dtype": str,
    "kv_cache_bytes_per_rank": int,
    "weights_bytes_per_rank": int,
    "memory": dict,
    "groups": list,
    "slab_bytes": int,
    "arena_bytes": int,
    "arena_use": dict,
    "fixed_bytes_per_sequence": int,
    "bytes_per_token": NUMBER,
    "bytes_per_sequence": int,
    "shortest_reusable_prefix_tokens": int,
    "restore_point_bytes": int,
    "host_bytes_per_rank": int,
    "host_sessions": int,
    "max_model_len": int,
    "concurrency": NUMBER,
    "sequences": int,
    "curve": list,
    "kv_format_gates": dict,
    "peers": list,
    "layout_explanation": list,
    "why_not_run": str,
    "notes": list,
}
GROUP: dict[str, Any] = {
    "name": str,
    "retention": str,
    "retention_tokens": int,
    "layers": int,
    "kv_format": str,
    "block_tokens": int,
    "stripes": int,
    "page_bytes": int,
    "pages_per_slab": int,
    "bytes_per_token": NUMBER,
    "pages_per_sequence": int,
}
PEER: dict[str, Any] = {
    "engine": str,
    "version": str,
    "covers": str,
    "async_scheduling": bool,
    "max_num_batched_tokens": int,
    "variant": str,
    "reported_tokens": int,
    "concurrency": NUMBER,
    "groups": list,
    "num_blocks": int,
    "block_bytes": int,
    "bytes_per_request": int,
    "charge_note": str,
    "report_note": str,
    "error": str,
    "unknown": str,
    "same_flags": bool,
    "alternative": bool,
    "note": str,
}
NULLABLE_GROUP = {"retention_tokens", "kv_format", "block_tokens"}
NULLABLE_PEER = {"async_scheduling", "error", "unknown"}
# Engines that say less in their logs, or of which less is known, leave more open.
NULLABLE_OTHERS = NULLABLE_PEER | {"reported_tokens", "concurrency", "num_blocks", "block_bytes", "bytes_per_request"}
NULL_WITHOUT_MEMORY = {
    "device",
    "kv_cache_bytes_per_rank",
    "memory",
    "arena_bytes",
    "arena_use",
    "concurrency",
    "sequences",
}


def check(value: dict[str, Any], schema: dict[str, Any], nullable: set[str]) -> None:
    assert list(value) == list(schema)
    for key, kind in schema.items():
        assert isinstance(value[key], kind) or (key in nullable and value[key] is None), (key, value[key])


class TestDocument:
    @pytest.mark.parametrize("model", ["gemma-4-31b", "qwen3.5-27b", "llama-3.1-8b", "llama-4-scout"])
    def test_has_exactly_the_documented_fields(self, terminal: Terminal, model: str) -> None:
        document = terminal.document(model, "--gpu", "8xh200")
        check(document, DOCUMENT, {"speculative_config", "why_not_run"})
        for group in document["groups"]:
            check(group, GROUP, NULLABLE_GROUP)
        for other in document["peers"]:
            check(other, PEER, NULLABLE_PEER if other["engine"] == "vLLM" else NULLABLE_OTHERS)
        versions = {p["version"] for p in document["peers"] if p["engine"] == "vLLM"}
        assert versions == {"0.20.0", "0.25.0", "0.26.0"}
        assert {p["engine"] for p in document["peers"]} == {"vLLM", "SGLang", "TensorRT-LLM", "llama.cpp"}

    def test_without_memory_unknown_figures_are_null(self, terminal: Terminal) -> None:
        document = terminal.document("gemma-4-31b")
        nullable = NULL_WITHOUT_MEMORY | {"speculative_config", "why_not_run"}
        check(document, DOCUMENT, nullable)
        assert {key for key in document if document[key] is None} == nullable
        assert document["peers"] == document["curve"] == []

    def test_drafts_are_counted_to_the_byte(self, terminal: Terminal) -> None:
        config = '{"method": "ngram", "num_speculative_tokens": 4}'
        plain, drafts = (terminal.document("gemma-4-31b", *flags) for flags in ((), ("-sc", config)))
        assert (plain["rollback_tokens"], drafts["rollback_tokens"]) == (0, 9)
        window = next(group for group in drafts["groups"] if group["retention"] == "window")
        more = window["pages_per_sequence"] - plain["groups"][drafts["groups"].index(window)]["pages_per_sequence"]
        assert more * window["page_bytes"] == drafts["bytes_per_sequence"] - plain["bytes_per_sequence"] > 0

    def test_what_a_drafter_takes_for_itself_is_said(self, terminal: Terminal) -> None:
        config = '{"method": "mtp", "num_speculative_tokens": 3}'
        flags = ("qwen3.5-35b-a3b", "--gpu", "h200", "--max-model-len", "32768")
        plain, drafts = (terminal.document(*flags, *more) for more in ((), ("-sc", config)))
        more_bytes = drafts["bytes_per_sequence"] - plain["bytes_per_sequence"]
        weights = [document["memory"]["weights_bytes"] for document in (plain, drafts)]
        text = " ".join(terminal.report(*flags, "-sc", config).split())
        assert f"0 B a sequence and {format_bytes(more_bytes)} of the drafter's own KV" in text
        assert f"and {format_bytes(weights[1] - weights[0])} of weights" in text
        assert "keep nothing of their own" not in text, "its layer is none of the model's"

    def test_documentation_names_every_field(self) -> None:
        text = (Path(__file__).parents[1] / "docs" / "plan-json.md").read_text("utf-8")
        for field in (*DOCUMENT, *GROUP, *PEER):
            assert f"`{field}`" in text, field

    def test_bytes_add_up(self, terminal: Terminal) -> None:
        document = terminal.document("gemma-4-31b", "--gpu", "h200")
        memory, use = document["memory"], document["arena_use"]
        spent = memory["weights_bytes"] + memory["activation_bytes"] + memory["runtime_bytes"] + memory["kv_bytes"]
        assert spent == memory["usable_bytes"]
        assert document["kv_cache_bytes_per_rank"] == memory["kv_bytes"]
        assert 0 <= memory["kv_bytes"] - document["arena_bytes"] < document["slab_bytes"]
        assert sum(use["group_bytes"].values()) + use["stranded_bytes"] + use["free_bytes"] == document["arena_bytes"]
        one = sum(g["pages_per_sequence"] * g["page_bytes"] for g in document["groups"])
        assert one == document["bytes_per_sequence"]
        assert sum(use["group_bytes"].values()) == one * document["sequences"]

    def test_the_curve_falls_and_ends_at_the_planned_length(self, terminal: Terminal) -> None:
        document = terminal.document(*TP2)
        lengths, counts = zip(*document["curve"], strict=True)
        assert list(lengths) == sorted(lengths) and list(counts) == sorted(counts, reverse=True)
        assert [lengths[-1], counts[-1]] == [document["max_model_len"], document["sequences"]]

    @pytest.mark.parametrize("flag", ["--async-scheduling", "--no-async-scheduling"])
    def test_async_scheduling_says_which_row_is_yours(self, terminal: Terminal, flag: str) -> None:
        wanted = flag == "--async-scheduling"
        document = terminal.document(*TP2, flag)
        assert document["async_scheduling"] is wanted
        assert [p["async_scheduling"] for p in document["peers"] if p["same_flags"]] == [wanted]
        mode = "async" if wanted else "sync"
        (marked,) = (line for line in terminal.report(*TP2, flag).splitlines() if line.startswith("›"))
        assert f"vLLM 0.26+ {mode} " in marked and marked.endswith("your flags")


class TestReport:
    @pytest.mark.parametrize("model", shipped_names())
    def test_nothing_is_cut_off_or_padded(self, terminal: Terminal, model: str) -> None:
        flags = ("--explain", "--kv-cache-memory-bytes", "40GiB", "--kv-cache-dtype", "int8_per_token_head")
        for columns, words in ((120, (model,)), (80, (model, *flags))):
            for line in terminal.report(*words, columns=columns).splitlines():
                assert "…" not in line
                assert line == line.rstrip()
                assert len(line) <= columns

    @pytest.mark.parametrize("model", ["jamba-mini", "kimi-linear-48b"])
    def test_a_model_that_is_planned_only_says_so_with_generates_reason(self, terminal: Terminal, model: str) -> None:
        with pytest.raises(ModelError) as refused:
            runnable(load(model))
        told = " ".join(terminal.report(model).split())
        assert f"can be planned, not run: {refused.value}" in told
        assert terminal.document(model)["why_not_run"] == str(refused.value)
        assert "not run" not in terminal.report("llama-3.1-8b")

    def test_a_model_that_runs_on_cpus_only_says_so_where_a_gpu_is_named(
        self, terminal: Terminal, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text(json.dumps(small("qwen3.5", linear_value_head_dim=24)))
        on_gpu, on_cpu = (terminal.document(str(tmp_path), "--gpu", gpu)["why_not_run"] for gpu in ("h200", "cpu"))
        assert "recurrent states of 16 × 24 values a head" in on_gpu and "run on CPUs only" in on_gpu
        assert on_cpu is None

    @pytest.mark.parametrize("columns", [64, 80, 120])
    def test_the_bar_is_one_whole(self, terminal: Terminal, columns: int) -> None:
        for gpu in ("2x3090", "h200", "4xl4"):
            report = terminal.report("gemma-4-31b-awq-4bit", "--gpu", gpu, columns=columns)
            (bar,) = (line for line in report.splitlines() if line.strip("█ ") == "" and "█" in line)
            assert len(bar.strip()) == 60

    def test_one_is_not_many(self, terminal: Terminal) -> None:
        report = terminal.report("llama-3.1-8b", "--gpu", "4090")
        assert "1 sequence of" in report and "1 sequences" not in report
        assert "at which one sequence fits" in " ".join(report.split())

    def test_where_it_runs_is_said_in_words(self, terminal: Terminal) -> None:
        def first_line(*words: str) -> str:
            return terminal.report("gemma-4-e4b", *words).splitlines()[0]

        assert first_line() == "gemma-4-e4b · no card given"
        assert first_line("--tensor-parallel-size", "2").endswith("2 tensor-parallel ranks, no card given")
        assert first_line("--gpu-memory", "24GiB").endswith("a card (24.00 GiB)")
        assert first_line("--gpu", "2x4090").endswith("2 × GeForce RTX 4090 (23.65 GiB), tensor parallel")
        assert first_line("--gpu", "cpu", "--gpu-memory", "64GiB").endswith("this CPU (64.00 GiB)")

    def test_states_are_kept_once_where_steps_do_not_overlap_as_on_a_cpu(self, terminal: Terminal) -> None:
        cpu = ("lfm2-1.2b", "--gpu", "cpu", "--gpu-memory", "64GiB")
        assert "1 slot per layer" in terminal.report(*cpu)
        assert "1 slot per layer" in terminal.report("lfm2-1.2b", "--gpu", "h200", "--no-async-scheduling")
        for words in (("lfm2-1.2b", "--gpu", "h200"), (*cpu, "--async-scheduling")):
            assert "2 slots per layer" in terminal.report(*words)

    def test_without_memory_it_names_cards(self, terminal: Terminal) -> None:
        assert "--gpu 4x3090" in terminal.report("gemma-4-31b")

    def test_a_sequence_limit_below_what_fits_is_told(self, terminal: Terminal) -> None:
        flags = ("gemma-3-270m", "--gpu", "h200", "--max-num-seqs", "4")
        assert "--max-num-seqs 4 runs fewer than fit" in terminal.report(*flags)

    def test_software_formats_say_so_and_explain_says_why(self, terminal: Terminal) -> None:
        flags = ("qwen3-8b", "--gpu", "3090", "--kv-cache-dtype", "fp8_e4m3")
        assert "decoded in software" in " ".join(terminal.report(*flags).split())
        assert "needs SM 8.9" in " ".join(terminal.report(*flags, "--explain").split())

    def test_layers_without_kv_are_counted(self, terminal: Terminal) -> None:
        assert "18 of 42 layers keep nothing of their own" in terminal.report("gemma-4-e4b", "--gpu", "4090")

    def test_colour_only_where_it_is_wanted(self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "\x1b" not in terminal.report(*TP2)
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert "\x1b" in terminal.report(*TP2)

    def test_models_lists_every_shipped_name(self, terminal: Terminal) -> None:
        code, out, _ = terminal.run("models")
        assert code == 0
        _, *rows, note = out.splitlines()
        assert [line.split()[0] for line in rows] == shipped_names()
        assert all(len(line) <= 80 for line in rows)
        assert note.startswith("* the engine runs these")
        marked = {line.split()[0] for line in rows if line.split()[1] == "*"}
        assert {"gemma-4-31b", "qwen3-8b", "qwen3-30b-a3b"} <= marked and not {"deepseek-v3", "jamba-mini"} & marked

    def test_help_names_all_parsers(self, terminal: Terminal) -> None:
        words = set(re.findall(r"\w+", terminal.run("serve", "--help")[1]))
        assert {*REASONING_PARSERS, *TOOL_PARSERS} <= words

    def test_version_and_help(self, terminal: Terminal) -> None:
        assert terminal.run("--version")[:2] == (0, f"windowpane {__version__}\n")
        for words in ((), ("--help",), ("plan", "-h")):
            code, out, _ = terminal.run(*words)
            assert code == 0
            assert "Usage: windowpane" in out

    def test_a_flag_reads_the_same_in_every_command(self) -> None:
        """Apart from `doctor`, whose flags say what vLLM ran with, and four names that mean different things."""
        told: dict[str, set[tuple[str, str]]] = {}
        for name, command in typer.main.get_command(cli.app).commands.items():  # type: ignore[attr-defined]
            for option in command.params if name != "doctor" else ():
                told.setdefault(option.name, set()).add((option.help, option.rich_help_panel))
        assert {name for name, texts in told.items() if len(texts) > 1} == {
            "model", "replicas", "seed", "workload",
        }  # fmt: skip


ERRORS: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown model": (("gemma-4-32b",), "gemma-4-31b or"),
    "impossible fit": ((*TP2, "--concurrency", "9"), "The longest that fits is --max-model-len "),
    "weights that do not fit": (("gemma-4-31b", "--gpu", "3090"), "It fits on --gpu 4x3090"),
    "bad size": ((*STORY, "--kv-cache-memory-bytes", "lots"), "11.54GiB"),
    "bad card memory": ((*STORY, "--gpu-memory", "12XB"), "unknown unit 'XB'"),
    "ranks that do not divide": ((*STORY, "--tensor-parallel-size", "3"), "works with 1, 2, 4, 8"),
    "cards that do not divide": (("gemma-4-31b", "--gpu", "3xh200"), "works with 1, 2, 4, 8"),
    "unknown dtype": ((*STORY, "--kv-cache-dtype", "int3"), "int8_per_token_head"),
    "unknown group": ((*STORY, "--kv-cache-dtype", "chunk=bfloat16"), "its groups: full, window"),
    "unknown card": ((*STORY, "--gpu", "2x3091"), "did you mean 3090"),
    "no tokens": (("gemma-4-31b", "--max-model-len", "0"), "131072"),
    "an empty value": (("gemma-4-31b", "--max-model-len", ""), "131072"),
    "too long for the model": (("gemma-4-31b", "--max-model-len", "1M"), "its limit is 262,144"),
    "utilization 2": ((*STORY, "--gpu-memory-utilization", "2"), "between 0 and 1"),
    "utilization nan": ((*STORY, "--gpu-memory-utilization", "nan"), "between 0 and 1"),
    "no sequences": ((*STORY, "--max-num-seqs", "0"), "at least 1"),
    "unknown option": ((*STORY, "--frobnicate"), "--frobnicate"),
    "a word for a number": ((*STORY, "--max-num-seqs", "many"), "--max-num-seqs"),
    "an extra word": ((*STORY, "extra"), "extra"),
    "no model": ((), "Missing argument"),
}


class TestErrors:
    def check(self, result: Run, hint: str) -> None:
        code, out, err = result
        assert (code, out) == (2, "")
        assert err.startswith("windowpane: ") and err.count("\n") == 1 and err.endswith("\n")
        assert hint in err

    @pytest.mark.parametrize("case", ERRORS)
    def test_each_is_one_line_that_names_the_way_out(self, terminal: Terminal, case: str) -> None:
        words, hint = ERRORS[case]
        self.check(terminal.run("plan", *words), hint)

    def test_files_that_cannot_be_read(self, terminal: Terminal, tmp_path: Path) -> None:
        binary, broken, unknown = tmp_path / "binary.json", tmp_path / "broken.json", tmp_path / "unknown.json"
        binary.write_bytes(b"\xff\xfe\x00")
        broken.write_text('{"architectures": [')
        unknown.write_text(json.dumps(small("gemma2", layer_types=["full_attention"] * 3 + ["sparse_attention"])))
        (tmp_path / "config.json").mkdir()
        (tmp_path / "empty").mkdir()
        self.check(terminal.run("plan", str(binary)), "cannot read")
        self.check(terminal.run("plan", str(broken)), "not valid JSON")
        self.check(terminal.run("plan", str(unknown)), "'sparse_attention'")
        self.check(terminal.run("plan", str(tmp_path)), "cannot read")
        self.check(terminal.run("plan", str(tmp_path / "empty")), "holds no config.json")

    def test_an_unknown_command(self, terminal: Terminal) -> None:
        self.check(terminal.run("fly"), "fly")

    def test_a_bug_is_not_dressed_up_as_a_user_error(self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr("windowpane.plan.document.document", broken)
        with pytest.raises(ValueError, match="a bug"):
            terminal.run("plan", "gemma-4-31b", "--json")

    def test_from_a_model_directory(self, terminal: Terminal, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(small("gemma4")))
        document = terminal.document(str(tmp_path), "--gpu-memory", "8GiB")
        assert document["model"] == tmp_path.name
        assert [g["retention"] for g in document["groups"]] == ["window", "full"]


@pytest.mark.parametrize("words", [["--help"], ["plan", "gemma-4-31b", "--gpu", "h200"], ["plan", "qwen3.5-27b"]])
def test_planning_imports_neither_torch_nor_numpy(words: list[str]) -> None:
    heavy = "{'torch', 'numpy', 'transformers'}"
    script = (
        f"import sys; sys.argv = ['windowpane', *{words!r}]\n"
        "from windowpane.cli.main import main\n"
        "code = main()\n"
        f"sys.exit(code or sorted(set(sys.modules) & {heavy}))"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    print(f"windowpane {' '.join(words)}: {time.perf_counter() - start:.2f} s")
    assert (done.returncode, done.stderr) == (1, "[]\n")  # what was imported, as sys.exit prints it


def test_a_terminal_without_block_characters_gets_question_marks() -> None:
    command = [sys.executable, "-c", "import sys; from windowpane.cli.main import main; sys.exit(main())", "plan"]
    done = subprocess.run(
        [*command, "gemma-4-31b", "--gpu", "h200"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "6 sequences" in done.stdout


class TestRunningAModel:
    """`generate`, `chat` and `bench` on a small random model."""

    FLAGS = (
        *("--device", "cpu", "--load-format", "dummy", "--kv-cache-memory-bytes", "4MiB"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
    )

    @pytest.fixture
    def model(self, tmp_path: Path) -> str:
        from tests.test_llm import make_model

        return str(make_model(tmp_path / "tiny"))

    def test_generate_prints_the_text_on_stdout_and_the_plan_on_stderr(self, terminal: Terminal, model: str) -> None:
        from windowpane import LLM, SamplingParams

        words = ("generate", model, "--prompt", "Hello", "--max-tokens", "12", *self.FLAGS)
        code, out, err = terminal.run(*words)
        flags = {"device": "cpu", "load_format": "dummy", "kv_cache_memory_bytes": 4 * 2**20, "max_num_seqs": 8}
        llm = LLM(model, max_num_batched_tokens=64, **flags)
        expected = llm.generate("Hello", SamplingParams(max_tokens=12, temperature=0))[0].text
        assert (code, out) == (0, f"{expected}\n")
        assert "predicted" in err and "12 tokens in" in err

    def test_a_seed_repeats_what_was_drawn(self, terminal: Terminal, model: str) -> None:
        words = ("generate", model, "--prompt", "Hello", "--max-tokens", "20", "--temperature", "1", *self.FLAGS)
        first, again, other = (terminal.run(*words, "--seed", seed)[1] for seed in ("1", "1", "2"))
        assert first == again != other

    def test_a_prompt_can_be_piped_in(self, terminal: Terminal, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        given = terminal.run("generate", model, "--prompt", "Hello", "--max-tokens", "5", *self.FLAGS)
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
        piped = terminal.run("generate", model, "--max-tokens", "5", *self.FLAGS)
        assert piped[:2] == given[:2]

    def test_chat_answers_each_line_and_remembers(
        self, terminal: Terminal, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from windowpane.engine.llm import LLM

        heard = []
        encode = LLM.encode

        def listen(llm: LLM, prompt: Any) -> list[int]:
            heard.append([message["content"] for message in prompt])
            return encode(llm, prompt)

        monkeypatch.setattr(LLM, "encode", listen)
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nAnd then?\n"))
        words = ("chat", model, "--system", "Be brief.", "--max-tokens", "4", "--temperature", "0")
        code, out, _ = terminal.run(*words, *self.FLAGS)
        assert code == 0
        system, first, answer, second = heard[-1]
        assert (system, first, second) == ("Be brief.", "Hi", "And then?")
        assert out.startswith(f"{answer}\n")

    def test_a_chat_that_is_full_says_so(self, terminal: Terminal, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 100 + "\n"))
        code, _, err = terminal.run("chat", model, "--max-model-len", "64", *self.FLAGS)
        assert code == 2
        assert err.splitlines()[-1] == "windowpane: this chat has filled --max-model-len 64; start a new one"

    @pytest.mark.parametrize(
        ("words", "rounds", "output_tokens"),
        [
            (["--output-len", "8", "--input-len", "20"], 1, 8),
            (["--workload", "serve", "--requests", "5", "--input-len", "10-40", "--output-len", "6"], 1, 30),
            (["--workload", "turns", "--requests", "3", "--input-len", "50", "--more-len", "20"], 2, 2 * 3 * 64),
        ],
    )
    def test_bench_ends_with_one_json_line(
        self, terminal: Terminal, model: str, words: list[str], rounds: int, output_tokens: int
    ) -> None:
        code, out, _ = terminal.run("bench", model, *words, *self.FLAGS)
        results = json.loads(out.splitlines()[-1])
        assert code == 0
        assert (len(results["round_seconds"]), results["output_tokens"]) == (rounds, output_tokens)
        for name in ("output_tokens_per_second", "read_gb_per_second", "roof_gb_per_second"):
            assert results[name] > 0
        assert results["ttft_ms"]["median"] <= results["ttft_ms"]["p99"]
        for word in ("tok/s", "TTFT", "ITL", "GB/s", "of the roof", results["device"], results["torch"]):
            assert word in out

    def test_bench_counts_the_bytes_that_a_step_must_read(self, model: str) -> None:
        """One token at 19 past ones: weights without the looked-up embedding, 7 window tokens and 19 full ones."""
        import torch

        from windowpane.measure.rounds import past_bytes, read_weights_bytes
        from windowpane.models import load
        from windowpane.models.weights import parameter_count
        from windowpane.plan.config import EngineConfig
        from windowpane.plan.planner import size_up

        spec = load(model)
        assert read_weights_bytes(spec, torch.float32) == (4 * (parameter_count(spec) - 258 * 64), 0)
        layout = size_up(spec, EngineConfig(), 1, on_cpu=True).layout
        per_token = {g.name: g.bytes_per_token for g in layout.groups}
        assert past_bytes(layout, 19) == 7 * per_token["window-8"] + 19 * per_token["full"]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["generate", "{model}", "--prompt", "x", "--temperature", "-1"], "temperature must be 0"),
            (["generate", "{model}", "--prompt", "x", "--device", "tpu"], "use auto, cpu, cuda or cuda:1"),
            (["generate", "{model}", "--prompt", "x", "--max-model-len", "many"], "cannot read token count 'many'"),
            (["generate", "{model}", "--prompt", "x", "--max-model-len", "9999"], "its limit is 512"),
            (["generate", "{model}", "--prompt", "x", "--max-tokens", "900"], "exceed max_model_len 512"),
            (["generate", "{model}/nowhere", "--prompt", "x"], "no model directory"),
            (["generate", "gemma-4-31b", "--prompt", "x"], "a shape without weights"),
            (["bench", "{model}", "--workload", "sprint"], "unknown workload 'sprint'; there are serve, turns, b1"),
            (["bench", "{model}", "--input-len", "9-3"], "write 512, or 100-1024 for a range"),
            (["bench", "{model}", "--input-len", "600"], "shorten --input-len or --output-len"),
        ],
    )
    def test_what_cannot_be_done_is_one_line(
        self, terminal: Terminal, model: str, words: list[str], message: str
    ) -> None:
        flags = () if "gemma-4-31b" in words else self.FLAGS[2:]
        code, out, err = terminal.run(*(word.replace("{model}", model) for word in words), *flags)
        assert (code, out) == (2, "")
        last = err.splitlines()[-1]
        assert last.startswith("windowpane: ") and message in last

    def test_a_base_model_does_not_chat(self, terminal: Terminal, tmp_path: Path) -> None:
        """It is told before a message is typed, and what to do instead."""
        from tests.tiny_model import make_model

        base = str(make_model(tmp_path / "base", chat_template=None))
        code, out, err = terminal.run("chat", base, *self.FLAGS[2:])
        assert (code, out) == (2, "")
        assert "has no chat template, so it cannot chat; it is probably a base model" in err.splitlines()[-1]

    def test_a_missing_package_names_its_command(
        self, terminal: Terminal, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        monkeypatch.delitem(sys.modules, "windowpane.engine.llm", raising=False)
        monkeypatch.delitem(sys.modules, "windowpane.engine.engine", raising=False)
        code, _, err = terminal.run("generate", model, "--prompt", "x")
        assert (code, err) == (2, "windowpane: running a model needs the package torch: pip install torch\n")
