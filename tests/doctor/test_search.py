"""Which settings give a log's figures: found where they can be, and never claimed where they are not."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from windowpane.doctor.diagnosis import Diagnosis, diagnose
from windowpane.doctor.log import LogError, LogFacts
from windowpane.doctor.report import print_diagnosis
from windowpane.doctor.shapes import find_model
from windowpane.kv.retention import Full
from windowpane.models import load
from windowpane.plan.peers import vllm
from windowpane.plan.peers.setting import Setting
from windowpane.plan.peers.vllm_releases import HISTORY, Release, neighbours, release_of

GIB = 2**30


def figures(memory: str, tokens: str, length: str, concurrency: str) -> str:
    return (
        f"INFO 05-05 05:05:05 [gpu_worker.py:1] Available KV cache memory: {memory} GiB\n"
        f"INFO 05-05 05:05:05 [kv_cache_utils.py:1] GPU KV cache size: {tokens} tokens\n"
        f"INFO 05-05 05:05:05 [kv.py:2] Maximum concurrency for {length} tokens per request: {concurrency}x\n"
    )


def explained(text: str, **given: object) -> Diagnosis:
    found = diagnose(text, LogFacts(**given))  # type: ignore[arg-type]
    assert found.explanation is not None and found.explanation.exact, found.doubts
    return found


def shown(found: Diagnosis) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_diagnosis(console, found)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestReleases:
    @pytest.mark.parametrize(
        ("version", "covers"),
        [
            ("0.10.2", "up to 0.11"),
            ("0.11.2", "up to 0.11"),
            ("0.12.0", "0.12–0.17"),
            ("0.17.1", "0.12–0.17"),
            ("0.18.0", "0.18–0.19"),
            ("0.20.0", "0.20.0"),
            ("0.20.1", "0.20.1–0.25"),
            ("0.32.0", "0.26+"),
        ],
    )
    def test_every_release_has_its_rules(self, version: str, covers: str) -> None:
        assert release_of(version).covers == covers

    def test_a_build_between_releases_may_behave_as_either(self) -> None:
        assert [r.covers for r in neighbours("0.20.1rc1.dev16+g7a1eb8ac2")] == ["0.20.1–0.25", "0.26+", "0.20.0"]
        assert neighbours("0.24.0") == (release_of("0.24.0"),)
        assert len(neighbours("0.1.dev20073+g8e685d198")) == len(HISTORY)

    @pytest.mark.parametrize(
        ("full", "sliding", "places"),
        [
            (12, 13, {"up to 0.11": 12, "0.12–0.17": 13, "0.18–0.19": 13}),
            (10, 14, {"up to 0.11": 10, "0.12–0.17": 10, "0.18–0.19": 14}),
            (10, 15, {"up to 0.11": 10, "0.12–0.17": 10, "0.18–0.19": 10}),
        ],
    )
    def test_groups_are_as_large_as_the_release_makes_them(
        self, full: int, sliding: int, places: dict[str, int]
    ) -> None:
        spec = load("gemma-3-27b")
        caches = {c.retention: c for c in spec.caches}
        window = next(c for r, c in caches.items() if r != Full())
        setting = Setting(
            caches=(window,) * sliding + (caches[Full()],) * full,
            kv_cache_dtype="auto",
            compute_dtype="bfloat16",
            kv_cache_bytes=8 * GIB,
            max_model_len=8192,
            max_num_batched_tokens=2048,
        )
        found = {r.covers: vllm.form_groups(setting, r)[0].places for r in HISTORY if r.covers in places}
        assert found == places


class TestSearching:
    def test_settings_that_no_line_names_are_found(self) -> None:
        """Two ranks, fp8, states aligned with blocks: what a cut-off log of a 27B hybrid leaves out."""
        found = explained(figures("9.84", "619,202", "262,144", "2.36"), model="qwen3.5-27b")
        assert found.explanation is not None
        assert found.explanation.assumed == (
            "vLLM 0.26+ or 0.20.1–0.25",
            "tensor_parallel_size 2",
            "kv_cache_dtype fp8",
            "mamba_cache_mode align",
        )

    def test_drafts_are_found_when_nothing_else_fits(self) -> None:
        found = explained(figures("11.05", "623,873", "262,144", "2.38"), model="qwen3.5-27b")
        assert found.explanation is not None and "3 drafts a step (MTP)" in found.explanation.assumed

    def test_a_drafter_that_no_line_names_is_said(self) -> None:
        """A dense model with one layer more fits whatever the number of drafts."""
        found = explained(figures("20.00", "158,864", "8,192", "19.39"), model="llama-3.1-8b")
        assert found.explanation is not None
        assert "a drafter of one more layer (MTP or EAGLE)" in found.explanation.assumed

    def test_what_the_figures_do_not_decide_is_not_named(self) -> None:
        found = explained(figures("6.51", "42,656", "32,768", "1.30"), model="qwen3-14b")
        assert found.explanation is not None and found.explanation.assumed == ("tensor_parallel_size 1",)
        assert "vLLM" not in shown(found).split("come out exactly")[1].splitlines()[0]

    def test_mtp_is_counted(self) -> None:
        """One more full layer, k more columns of convolution state, 1 + k blocks per state group."""
        engine = (
            "INFO 05-05 05:05:00 [core.py:1] Initializing a V1 LLM engine (v0.22.0) with config: "
            "model='acme/Qwen3.6-35B-A3B', speculative_config=SpeculativeConfig(method='mtp', num_spec_tokens=3), "
            "dtype=torch.bfloat16, max_seq_len=262144, tensor_parallel_size=1, kv_cache_dtype=auto, "
            "enable_prefix_caching=False\n"
        )
        found = explained(engine + figures("74.22", "3,366,051", "262,144", "12.84"))
        assert found.explanation is not None
        report = found.explanation.report
        assert (report.num_blocks, [g.blocks_per_request for g in report.groups]) == (3300, [4, 4, 4, 245])
        assert [g.layers for g in report.groups] == [10, 10, 10, 11]

    def test_memory_that_the_log_leaves_out_is_found_too(self) -> None:
        text = figures("1", "3,366,051", "262,144", "12.84").split("\n", 1)[1]
        found = explained(
            text, model="qwen3.6-35b-a3b", tensor_parallel_size=1, speculative_method="mtp", speculative_tokens=3
        )
        assert found.explanation is not None and "74.22 GiB of KV memory" in found.explanation.assumed

    def test_blocks_of_another_size_are_found_when_nothing_else_fits(self) -> None:
        """A platform whose attention insists on blocks of 64 tokens; no state is what makes them longer."""
        flags = "vllm serve acme/gemma-4-31B-it -tp 2 --max-num-batched-tokens 8192 --no-async-scheduling\n\n"
        found = explained(flags + figures("10.12", "169,314", "163,840", "1.03"))
        assert found.explanation is not None and "blocks of 64 tokens" in found.explanation.assumed
        assert found.explanation.report.groups[0].block_tokens == 64
        assert "recurrent state" not in shown(found)

    @pytest.mark.parametrize("release", HISTORY, ids=lambda r: r.covers)
    @pytest.mark.parametrize("hybrid_manager", [True, False])
    def test_whatever_vllm_would_print_is_explained(self, release: Release, hybrid_manager: bool) -> None:
        spec = load("gemma-3-27b")
        caches = tuple(c.shard(2) for c in spec.caches)
        if not hybrid_manager:
            caches = tuple(replace(c, retention=Full()) for c in caches)
        setting = Setting(
            caches=caches,
            kv_cache_dtype="fp8_e4m3",
            compute_dtype="bfloat16",
            kv_cache_bytes=int(9.37 * GIB),
            max_model_len=40_000,
            max_num_batched_tokens=8192,
        )
        peer = vllm.report(setting, release, True)
        text = figures("9.37", f"{peer.reported_tokens:,}", "40,000", f"{peer.concurrency:.2f}")
        found = explained(text, model="gemma-3-27b")
        assert found.explanation is not None
        assert found.explanation.report.concurrency == pytest.approx(peer.concurrency, abs=0.005)
        fit = (found.explanation.sizing.ranks, *found.explanation.alternatives)
        assert any(n == 2 or "tensor_parallel_size 2 with kv_cache_dtype fp8" in str(n) for n in fit)


class TestNames:
    @pytest.mark.parametrize(
        ("name", "shipped"),
        [
            ("/input/gpt-oss-120b/transformers/default/1", "gpt-oss-120b"),
            ("acme/gemma-4-31B-it-FP8-Dynamic", "gemma-4-31b"),
            ("Qwen/Qwen3-1.7B", "qwen3-0.6b"),
            ("acme/Nemotron-Cascade-2-30B-A3B-NVFP4", "nemotron-3-nano-30b-a3b"),
            ("/models/Qwen3-32B-20250429/", "qwen3-32b"),
            ("/hub/models--meta-llama--llama-3-1-70b-instruct", "llama-3.1-70b"),
            ("$ROOT/MiniMax-M2.7", "minimax-m2"),
            ("Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ],
    )
    def test_a_model_is_known_by_a_directory_or_by_one_of_the_same_shapes(self, name: str, shipped: str) -> None:
        spec, doubt = find_model(name)
        assert spec.name == shipped and name in doubt

    def test_shapes_that_are_taken_over_give_exact_figures(self) -> None:
        engine = (
            "INFO 05-05 05:05:00 [core.py:1] Initializing a V1 LLM engine (v0.20.1rc1.dev91+ga749a33d8) with config: "
            "model='acme/Nemotron-Cascade-2-30B-A3B-NVFP4', speculative_config=None, dtype=torch.bfloat16, "
            "max_seq_len=256000, tensor_parallel_size=1, kv_cache_dtype=fp8_e4m3, enable_prefix_caching=False\n"
        )
        explained(engine + figures("3.72", "1,206,303", "256,000", "4.71"), mamba_ssm_cache_dtype="float32")
        explained(figures("18.78", "175,856", "1,024", "171.73"), model="qwen3-1.7b")


class TestHonesty:
    def test_a_release_that_the_log_does_not_name_is_not_blamed(self) -> None:
        found = diagnose("Available KV cache memory: 1.71 GiB\n", LogFacts(model="gpt-oss-120b"))
        assert "The log names no release." in shown(found)

    def test_memory_of_one_pipeline_stage_is_not_compared_with_all_layers(self) -> None:
        text = (
            "vllm serve acme/Qwen3-Coder-30B-A3B-Instruct-FP8 --pipeline-parallel-size 2\n\nValueError: To serve at "
            "least one request with the models's max seq len (262144), (24.0 GiB KV cache is needed, which is larger "
            "than the available KV cache memory (3.18 GiB). Based on the available memory, the estimated maximum model "
            "length is 34736."
        )
        found = diagnose(text, LogFacts())
        (failure,) = found.failures
        assert "per rank" not in failure.cause and found.capacity is None and found.explanation is None

    @pytest.mark.parametrize(
        ("text", "engine"),
        [
            ("[2026-01-31 13:50:39 TP1] KV Cache is allocated. #tokens: 300288, K size: 8.38 GB", "SGLang"),
            ("llama_kv_cache: size = 340.00 MiB", "llama.cpp"),
        ],
    )
    def test_other_engines_are_named(self, text: str, engine: str) -> None:
        with pytest.raises(LogError, match=f"looks like {engine}"):
            diagnose(text, LogFacts())

    def test_an_engine_that_runs_is_never_said_not_to_start(self) -> None:
        """int8 scales with Gemma 4 are refused by 0.20.0; a patched build runs, and the log wins."""
        engine = (
            "INFO 05-05 05:05:00 [core.py:1] Initializing a V1 LLM engine (v0.20.0) with config: "
            "model='google/gemma-4-31B-it', dtype=torch.bfloat16, max_seq_len=65536, tensor_parallel_size=2, "
            "kv_cache_dtype=int8_per_token_head\n"
        )
        found = diagnose(engine + figures("11.54", "60,000", "65,536", "3.33"), LogFacts())
        text = shown(found)
        assert found.unexplained
        assert "3.33 requests of 65,536 tokens fit at once" in " ".join(text.split())
        assert "would not start" not in text and "does not start" not in text and "So " not in text

    def test_an_unknown_model_still_gets_every_fact_and_bytes_per_token(self) -> None:
        engine = (
            "INFO 05-05 05:05:00 [core.py:1] Initializing a V1 LLM engine (v0.21.0) with config: "
            "model='nobody/unheard-of-9000B', dtype=torch.float16, max_seq_len=8192, tensor_parallel_size=4\n"
        )
        found = diagnose(engine + figures("8.11", "178,880", "8,192", "21.84"), LogFacts())
        text = shown(found)
        for fact in (
            "0.21.0",
            "nobody/unheard-of-9000B",
            "float16",
            "8.11 GiB",
            "178,880 tokens",
            "21.84×",
            "48,681 B",
        ):
            assert fact in text
        assert "--model" in text

    def test_without_ranks_and_memory_nothing_is_claimed(self) -> None:
        text = figures("1", "3,366,051", "262,144", "12.84").split("\n", 1)[1]
        found = diagnose(text, LogFacts(model="qwen3.6-35b-a3b"))
        assert found.unexplained and "does not say how much memory" in shown(found)
