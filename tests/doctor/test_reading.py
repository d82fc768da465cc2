"""What people paste: every fact from the engine's own lines, and from nothing that only looks like them."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windowpane.doctor.diagnosis import diagnose
from windowpane.doctor.log import LogError, LogFacts, read_log
from windowpane.doctor.text import decode

ENGINE = (
    "(EngineCore_DP0 pid=71) INFO 03-02 10:00:00 [core.py:93] Initializing a V1 LLM engine (v0.19.1) with config: "
    "model='acme/gemma-4-31B-it', speculative_config=SpeculativeConfig(method='eagle3', model='acme/tiny-drafter', "
    "num_spec_tokens=4, tensor_parallel_size=1), tokenizer='acme/gemma-4-31B-it', dtype=torch.bfloat16, "
    "max_seq_len=65536, tensor_parallel_size=4, pipeline_parallel_size=1, quantization=None, "
    "kv_cache_dtype=torch.float8_e4m3fn, enable_prefix_caching=False, compilation_config={'level': 3, 'custom_ops': []}"
)
FIGURES = """(Worker_TP0 pid=80) INFO 03-02 10:02:00 [gpu_worker.py:436] Available KV cache memory: 11.54 GiB
(EngineCore_DP0 pid=71) INFO 03-02 10:02:01 [kv_cache.py:1314] GPU KV cache size: 25,200 tokens
(EngineCore_DP0 pid=71) INFO 03-02 10:02:01 [kv_cache.py:1319] Maximum concurrency for 65,536 tokens per request: 1.87x
"""


def facts_of(text: str) -> LogFacts:
    (start,) = read_log(text).starts
    return start.facts


class TestSettings:
    def test_the_engine_speaks_for_itself_and_not_for_its_drafter(self) -> None:
        facts = facts_of(ENGINE)
        assert (facts.model, facts.tensor_parallel_size) == ("acme/gemma-4-31B-it", 4)
        assert (facts.speculative_method, facts.speculative_tokens) == ("eagle3", 4)
        assert (facts.dtype, facts.kv_cache_dtype) == ("bfloat16", "float8_e4m3fn")
        assert (facts.version, facts.max_model_len, facts.enable_prefix_caching) == ("0.19.1", 65_536, False)

    def test_prose_and_commands_of_other_experiments_are_not_its_settings(self) -> None:
        prose = "I also tried tensor_parallel_size=8 with model='other/model' and max_seq_len=4096, no luck.\n\n"
        command = "vllm serve other/gemma-3-4b-it -tp 8 --max-num-batched-tokens 512\n\n"
        facts = facts_of(prose + command + ENGINE + "\n\n" + "With kv_cache_dtype=auto it worked.\n")
        assert facts == facts_of(ENGINE)

    def test_non_default_arguments_are_all_that_is_not_a_default(self) -> None:
        facts = facts_of(
            "(APIServer pid=1) INFO 03-02 10:00:00 [utils.py:233] non-default args: {'model_tag': 'acme/m-7b', "
            "'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 2, 'model': 'acme/other'}, "
            "'max_model_len': 4096, 'served_model_name': ['a', 'b'], 'kv_cache_dtype': 'fp8', "
            "'mamba_cache_mode': 'all'}"
        )
        assert (facts.model, facts.max_model_len, facts.kv_cache_dtype) == ("acme/m-7b", 4096, "fp8")
        assert (facts.speculative_method, facts.speculative_tokens) == ("mtp", 2)
        assert (facts.tensor_parallel_size, facts.mamba_cache_mode) == (1, "all")

    def test_a_value_that_was_cut_off_is_not_the_value(self) -> None:
        arguments = "INFO [utils.py:233] non-default args: {'model': 'acme/gemma-4-31B-it', 'max_model_len': 4096}\n"
        engine = "INFO [core.py:93] Initializing a V1 LLM engine (v0.19.1) with config: model='acme/gem"
        facts = facts_of(arguments + engine)
        assert (facts.model, facts.version, facts.max_model_len) == ("acme/gemma-4-31B-it", "0.19.1", 4096)

    @pytest.mark.parametrize(
        "command",
        [
            "$ vllm serve acme/m-7b --tensor-parallel-size 2 --max-model-len 128K --kv-cache-dtype=fp8 "
            "--enable-prefix-caching",
            "vllm serve acme/m-7b -tp 2 \\\n  --max_model_len 131072 \\\n  --kv_cache_dtype fp8 \\\n"
            "  --enable-prefix-caching",
            "python -m vllm.entrypoints.openai.api_server --model acme/m-7b --tensor-parallel-size=2 "
            "--max-model-len 131072 --kv-cache-dtype fp8 --enable-prefix-caching",
            "docker run --gpus all vllm/vllm-openai:latest --model acme/m-7b -tp 2 --max-model-len 131072 "
            "--kv-cache-dtype fp8 --enable-prefix-caching",
            "llm = LLM(\n    model='acme/m-7b',\n    tensor_parallel_size=2,\n    max_model_len=131_072,\n"
            "    kv_cache_dtype='fp8',\n    enable_prefix_caching=True,\n)",
            "args:\n  - --model=acme/m-7b\n  - --tensor-parallel-size=2\n  - --max-model-len=131072\n"
            "  - --kv-cache-dtype=fp8\n  - --enable-prefix-caching",
        ],
    )
    def test_commands_are_read_with_their_flags(self, command: str) -> None:
        facts = facts_of(f"I ran\n\n```\n{command}\n```\n\nand got\n\n{FIGURES}")
        assert (facts.model, facts.tensor_parallel_size, facts.kv_cache_dtype) == ("acme/m-7b", 2, "fp8")
        assert (facts.enable_prefix_caching, facts.reported_tokens) == (True, 25_200)

    def test_a_list_in_yaml_may_have_flags_and_values_on_lines_of_their_own(self) -> None:
        items = (
            "--model",
            "acme/m-7b",
            "--max-model-len",
            "8192",
            "--speculative-config",
            '{"method": "mtp"}',
            "-tp",
            "2",
        )
        listed = "\n".join(f"      - '{item}'" if "{" in item else f'      - "{item}"' for item in (*items, "-tp", "2"))
        facts = facts_of(f"services:\n  llm:\n    command:\n{listed}\n\n{FIGURES}")
        assert (facts.model, facts.tensor_parallel_size, facts.speculative_method) == ("acme/m-7b", 2, "mtp")

    def test_a_config_line_whose_beginning_stands_above_a_fence_is_read(self) -> None:
        head, settings = ENGINE.split(" with config: ")
        facts = facts_of(f"{head} with config\n~~~\n{settings}\n~~~\n")
        assert (facts.version, facts.model, facts.tensor_parallel_size) == ("0.19.1", "acme/gemma-4-31B-it", 4)

    @pytest.mark.parametrize(
        ("command", "model"),
        [
            ("vllm serve --trust-remote-code -tp 2 --gpu_memory_utilization=0.9 /disk/acme/m-7b", "/disk/acme/m-7b"),
            ("vllm serve --port 80 acme/m-7b", "acme/m-7b"),
            ('vllm serve "$MODELS/m-7b" --port 80', "$MODELS/m-7b"),
            ("vllm serve --port 80 --served-model-name m", None),
        ],
    )
    def test_the_model_may_stand_behind_flags_or_a_variable(self, command: str, model: str | None) -> None:
        assert facts_of(command).model == model

    def test_a_summary_in_markdown_names_model_and_release(self) -> None:
        facts = facts_of("- **Model:** `acme/m-7b`\n- **vLLM:** `0.22.1`\n\n" + FIGURES)
        assert (facts.model, facts.version) == ("acme/m-7b", "0.22.1")
        assert facts_of("vLLM:     0.15.1\nTP:       4\n" + FIGURES).version == "0.15.1"

    def test_an_image_names_the_release(self) -> None:
        assert facts_of("docker run vllm/vllm-openai:v0.21.0 --model acme/m-7b -tp 2").version == "0.21.0"

    def test_placeholders_are_no_models(self) -> None:
        assert facts_of("vllm serve <your-model> --kv-cache-dtype fp8").model is None

    def test_the_length_that_was_used_wins_over_the_one_that_was_asked_for(self) -> None:
        assert facts_of(ENGINE + "\n" + FIGURES.replace("65,536", "32,768")).max_model_len == 32_768


class TestFigures:
    @pytest.mark.parametrize(
        ("line", "text", "low_gib"),
        [
            ("Available KV cache memory: -24.42 GiB", "-24.42 GiB", -24.425),
            ("Available KV cache memory: 0.0 GiB", "0.0 GiB", -0.05),
            (
                "Initial free memory 22.5 GiB, reserved 12.0 GiB memory for KV Cache as specified by "
                "kv_cache_memory_bytes config and skipped memory profiling.",
                "12.0 GiB",
                11.95,
            ),
            ("the rest of the memory reserved for KV Cache is -1.05GiB.", "-1.05 GiB", -1.055),
        ],
    )
    def test_memory_may_be_reserved_nothing_or_less_than_that(self, line: str, text: str, low_gib: float) -> None:
        memory = facts_of(f"INFO 03-02 10:00:00 [gpu_worker.py:436] {line}").available_kv
        assert memory is not None and memory.text == text
        assert memory.low == pytest.approx(low_gib * 2**30, abs=4)

    def test_memory_in_use_and_the_words_of_notes_are_read(self) -> None:
        in_use = facts_of(
            "INFO 09-18 22:23:41 [w.py:1] Free memory on device (94.41/94.97 GiB) on startup. Current kv cache memory "
            "in use is 8.64 GiB.\nINFO 09-18 22:23:42 [k.py:1] GPU KV cache size: 315,039 tokens, Maximum concurrency "
            "for 262,144 tokens per request: 1.20x"
        )
        assert in_use.available_kv is not None and in_use.available_kv.text == "8.64 GiB"
        assert (in_use.reported_tokens, in_use.concurrency) == (315_039, "1.20")
        notes = facts_of(
            "- available KV cache memory: 4.17 GiB\n- GPU KV cache size: 364,592 tokens\n"
            "- maximum concurrency for 4,096 tokens/request: 89.01x\n"
        )
        assert notes.available_kv is not None and notes.available_kv.text == "4.17 GiB"
        assert (notes.max_model_len, notes.concurrency) == (4096, "89.01")

    def test_memory_in_bytes_is_taken_as_exactly_as_it_is(self) -> None:
        in_use = "INFO 03-02 10:03:00 [gpu_worker.py:391] Current kv cache memory in use is {} bytes.\n"
        memory = facts_of(FIGURES + in_use.format(12_390_000_000)).available_kv
        assert memory is not None and (memory.low, memory.high) == (12_390_000_000, 12_390_000_000)
        other_rank = facts_of(FIGURES + in_use.format(12_460_000_000)).available_kv
        assert other_rank is not None and other_rank.text == "11.54 GiB"

    def test_of_several_ranks_the_smallest_counts(self) -> None:
        facts = facts_of(
            FIGURES + FIGURES.replace("11.54", "11.48").replace("25,200", "25,072").replace("1.87", "1.86")
        )
        assert facts.available_kv is not None and facts.available_kv.text == "11.48 GiB"
        assert (facts.reported_tokens, facts.concurrency) == (25_072, "1.86")

    def test_the_pool_that_graphs_are_profiled_with_is_not_the_engines(self) -> None:
        line = "INFO 04-13 19:51:20 [kv_cache.py:829] Overriding num_gpu_blocks={} with num_gpu_blocks_override=512\n"
        assert facts_of(line.format(0) + FIGURES).num_blocks is None
        assert facts_of(line.format(9453) + FIGURES).num_blocks == 512


class TestSurroundings:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda line: f"> {line}",
            lambda line: f"> > {line}",
            lambda line: f"▎ {line}",
            lambda line: f"2026-03-02 10:00:00.560 | {line}",
            lambda line: f"vllm-server-1  | {line}",
            lambda line: f"2026-03-02T10:00:00.123456789Z stdout F {line}",
            lambda line: f"[pod/vllm-0/server] {line}",
            lambda line: f"Mar  2 10:00:00 host vllm[812]: {line}",
            lambda line: f"\x1b[1;36m{line}\x1b[0m",
            lambda line: f"[0;36m{line}[0m",
            lambda line: f"[2026-03-02T10:00:00Z] {line}",
            lambda line: json.dumps({"log": line + "\n", "stream": "stderr"}),
        ],
    )
    def test_what_other_programs_put_around_a_line_is_taken_off(self, wrap: object) -> None:
        text = f"{ENGINE}\n{FIGURES}"
        wrapped = "\n".join(wrap(line) for line in text.splitlines())  # type: ignore[operator]
        assert facts_of(wrapped) == facts_of(text)

    @pytest.mark.parametrize("width", [72, 80, 119])
    def test_a_terminal_cuts_lines_wherever_they_reach_its_edge(self, width: int) -> None:
        lines = ["(EngineCore pid=3) ERROR 03-02 10:00:00 [core.py:708] EngineCore failed to start.", *([FIGURES] * 2)]
        cut = [line[at : at + width] for line in "\n".join(lines).splitlines() for at in range(0, len(line), width)]
        facts = facts_of("\n".join(cut))
        assert (facts.reported_tokens, facts.concurrency, facts.max_model_len) == (25_200, "1.87", 65_536)

    def test_a_notebook_is_read_for_its_outputs(self) -> None:
        output = {"output_type": "stream", "text": [line + "\n" for line in f"{ENGINE}\n{FIGURES}".splitlines()]}
        cell = {"cell_type": "code", "source": ["from vllm import LLM\n", "LLM('acme/m')"], "outputs": [output]}
        notebook = json.dumps({"cells": [{"cell_type": "markdown", "source": "# Try"}, cell], "nbformat": 4})
        assert facts_of(notebook) == facts_of(f"{ENGINE}\n{FIGURES}")

    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
    def test_any_encoding_that_a_shell_writes(self, encoding: str) -> None:
        text = f"{ENGINE}\n{FIGURES}"
        assert facts_of(decode(text.encode(encoding))) == facts_of(text)

    @given(st.binary(max_size=400), st.integers(0, len(ENGINE)))
    def test_nothing_in_a_log_raises_a_python_error(self, noise: bytes, cut: int) -> None:
        read_log(decode(ENGINE[:cut].encode() + noise + FIGURES.encode() + noise))

    @settings(max_examples=8)  # a search takes a second or two
    @given(st.binary(max_size=400), st.integers(0, len(ENGINE)))
    def test_nor_does_what_is_searched_from_it(self, noise: bytes, cut: int) -> None:
        text = decode(ENGINE[:cut].encode() + noise + FIGURES.encode() + noise)
        with suppress(LogError):
            diagnose(text, LogFacts())

    @given(st.text(alphabet="'\"{}()[]<>=,:\\ \n-a1.|`>", max_size=120))
    def test_nor_does_anything_in_its_settings(self, noise: str) -> None:
        read_log(f"{ENGINE[:140]}{noise}\nnon-default args: {{{noise}\nvllm serve {noise}")


class TestStarts:
    def test_several_starts_are_told_apart(self) -> None:
        second = ENGINE.replace("acme/gemma-4-31B-it", "acme/qwen3-8b").replace(
            "tensor_parallel_size=4", "tensor_parallel_size=2"
        )
        log = read_log(f"{ENGINE}\n{FIGURES}{second}\n{FIGURES.replace('25,200', '99,200')}")
        assert [(s.facts.model, s.facts.tensor_parallel_size, s.facts.reported_tokens) for s in log.starts] == [
            ("acme/gemma-4-31B-it", 4, 25_200),
            ("acme/qwen3-8b", 2, 99_200),
        ]

    def test_engines_of_one_start_are_one(self) -> None:
        log = read_log(
            f"{ENGINE}\n{ENGINE.replace('DP0', 'DP1')}\n{FIGURES}{FIGURES}{ENGINE.replace('Initializing a', 'Dumping')}"
        )
        assert len(log.starts) == 1

    def test_figures_above_their_settings_belong_to_them(self) -> None:
        assert facts_of(f"KV pool:\n\n{FIGURES}\n\nEngine:\n\n{ENGINE}").reported_tokens == 25_200

    def test_runs_without_settings_are_told_apart_by_length_and_tokens(self) -> None:
        other = FIGURES.replace("65,536", "32,768")
        assert [s.facts.max_model_len for s in read_log(f"A:\n\n{FIGURES}\n\nB:\n\n{other}").starts] == [65_536, 32_768]

    def test_memory_of_another_attempt_is_not_that_of_the_figures(self) -> None:
        """A guide shows a failure, then an engine that runs, and mentions a third attempt in passing."""
        guide = (
            "INFO 08-25 09:12:34 [w.py:276] Available KV cache memory: -2.16 GiB\n"
            "ValueError: No available memory for the cache blocks.\n\nBetter:\n\n"
            f"{FIGURES}\n\nOnce it said `Available KV cache memory: 0.35 GiB`, which is next to nothing.\n"
        )
        memories = [s.facts.available_kv.text for s in read_log(guide).starts if s.facts.available_kv]
        assert memories == ["-2.16 GiB", "11.54 GiB", "0.35 GiB"]
        found = diagnose(guide, LogFacts())
        assert (found.start, found.failures) == (2, ())

    def test_ranks_with_unequal_memory_are_one_start(self) -> None:
        line = "INFO 03-02 10:01:59 [w.py:436] Available KV cache memory: 7.02 GiB\n"
        memory = facts_of(line + FIGURES).available_kv
        assert memory is not None and memory.text == "7.02 GiB"

    def test_a_length_that_does_not_fit_is_another_start_than_one_that_runs(self) -> None:
        failed = (
            "ValueError: To serve at least one request with the models's max seq len (221000), (10.12 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (5.59 GiB)."
        )
        found = diagnose(f"With 65k:\n\n{FIGURES}\n\nWith 221k:\n\n{failed}\n", LogFacts())
        assert [s.facts.max_model_len for s in found.starts] == [65_536, 221_000]
        assert found.facts.available_kv is not None and found.facts.available_kv.text == "5.59 GiB"
        assert found.facts.reported_tokens is None

    def test_the_last_that_tells_something_is_explained_unless_another_is_asked_for(self) -> None:
        text = f"{ENGINE}\n{FIGURES}{ENGINE.replace('65536', '4096')}\n"
        assert [diagnose(text, LogFacts(), start).facts.max_model_len for start in (None, 1, 2)] == [
            65_536,
            65_536,
            4096,
        ]
        with pytest.raises(LogError, match="--start 3"):
            diagnose(text, LogFacts(), 3)
