"""SGLang, TensorRT-LLM and llama.cpp: their published rules on real shapes, and silence where no rule is known."""

from __future__ import annotations

from typing import Any

import pytest

from windowpane.models import load
from windowpane.plan.config import EngineConfig
from windowpane.plan.peers import llama_cpp, sglang, tensorrt_llm
from windowpane.plan.peers.all import reports
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.peers.setting import Setting
from windowpane.plan.planner import peer_setting, size_up

GIB = 2**30
SLIDING_BYTES = 16 * 2 * 256 * 2  # one token of one layer of Gemma 4 31B
FULL_BYTES = 4 * 2 * 512 * 2


def setting(model: str = "gemma-4-31b", kv_bytes: int = 64 * GIB, length: int = 131_072, **flags: Any) -> Setting:
    return peer_setting(size_up(load(model), EngineConfig(**flags), 1), None, kv_bytes, length)


def by_engine(model: str, **flags: Any) -> dict[str, PeerReport]:
    return {peer.name: peer for peer in reports(setting(model, **flags))}


class TestSGLang:
    def test_a_cell_is_a_full_token_and_four_fifths_of_a_sliding_one(self) -> None:
        cell = 10 * FULL_BYTES + 0.8 * 50 * SLIDING_BYTES
        peer = sglang.report(setting())
        assert peer.reported_tokens == int(64 * GIB // cell)
        assert peer.concurrency == pytest.approx(peer.reported_tokens / 131_072)

    def test_short_sequences_run_out_of_sliding_tokens_first(self) -> None:
        peer = sglang.report(setting(length=1000))
        assert peer.reported_tokens is not None
        assert peer.concurrency == pytest.approx(0.8 * peer.reported_tokens / 1000)

    def test_layers_that_share_kv_are_charged(self) -> None:
        """Gemma 4 E4B stores 20 sliding and 4 full layers, and has 35 and 7."""
        cell = 7 * 2 * 2 * 512 * 2 + 0.8 * 35 * 2 * 2 * 256 * 2
        assert sglang.report(setting("gemma-4-e4b")).reported_tokens == int(64 * GIB // cell)

    def test_gemma_3_keeps_every_token_in_every_layer(self) -> None:
        peer = sglang.report(setting("gemma-3-27b"))
        assert peer.reported_tokens == 64 * GIB // (62 * 16 * 2 * 128 * 2)
        assert "hybrid memory is off" in peer.charge_note

    def test_a_model_without_windows_holds_what_its_tokens_take(self) -> None:
        assert sglang.report(setting("qwen3-8b", length=40_960)).reported_tokens == 64 * GIB // (36 * 8 * 2 * 128 * 2)
        assert sglang.report(setting("deepseek-v3")).reported_tokens == 64 * GIB // (61 * 576 * 2)


class TestTensorRtLlm:
    def test_v1_gives_every_window_an_equal_share(self) -> None:
        peer = tensorrt_llm.report(setting(), "V1")
        assert [g.blocks_per_request for g in peer.groups] == [(1024 + 8192) // 32, 131_072 // 32]
        full_blocks = 32 * GIB // (32 * 10 * FULL_BYTES)
        assert peer.concurrency == pytest.approx(full_blocks / 4096)
        assert peer.reported_tokens is None
        assert "the full pool runs out first" in peer.charge_note

    def test_v2_starts_from_a_sequence_of_2048_tokens(self) -> None:
        """Such a sequence keeps all its tokens in both pools, so the shares are those of the bytes per token."""
        peer = tensorrt_llm.report(setting(), "V2")
        share = 10 * FULL_BYTES / (10 * FULL_BYTES + 50 * SLIDING_BYTES)
        full_blocks = int(64 * GIB * share) // (32 * 10 * FULL_BYTES)
        assert peer.concurrency == pytest.approx(full_blocks / 4096)

    def test_the_chunk_is_the_flag_where_given(self) -> None:
        peer = tensorrt_llm.report(setting(max_num_batched_tokens=2048), "V1")
        assert peer.groups[0].blocks_per_request == (1024 + 2048) // 32

    def test_a_window_as_long_as_the_sequence_is_no_pool_of_its_own(self) -> None:
        assert [g.name for g in tensorrt_llm.report(setting(length=1024), "V1").groups] == ["full"]


class TestLlamaCpp:
    @pytest.mark.parametrize(
        ("n_ctx", "window", "sequences", "cells"),
        [(131_072, 1024, 1, 1536), (131_072, 1024, 4, 4608), (1000, 1024, 1, 1024), (131_072, 512, 1, 1024)],
    )
    def test_sliding_cells(self, n_ctx: int, window: int, sequences: int, cells: int) -> None:
        assert llama_cpp.swa_cells(n_ctx, window, sequences) == cells

    def test_a_sequence_of_gemma_4_31b(self) -> None:
        peer = llama_cpp.report(setting())
        assert peer.bytes_per_request == 1536 * 50 * SLIDING_BYTES + 131_072 * 10 * FULL_BYTES
        assert peer.concurrency == pytest.approx(64 * GIB / peer.bytes_per_request)

    def test_swa_full_keeps_sliding_layers_at_full_length(self) -> None:
        peer = llama_cpp.report(setting(swa_full=True))
        assert peer.bytes_per_request == 131_072 * (50 * SLIDING_BYTES + 10 * FULL_BYTES)

    def test_layers_that_share_kv_own_nothing(self) -> None:
        peer = llama_cpp.report(setting("gemma-4-e4b"))
        assert {g.name: g.layers for g in peer.groups} == {"window-512": 20, "full": 4}


class TestHonesty:
    def test_nothing_is_made_up_for_models_that_only_slide(self) -> None:
        assert sglang.report(setting("mistral-7b-v0.1", length=32_768)).unknown

    @pytest.mark.parametrize("model", ["qwen3.5-27b", "llama-4-scout", "whisper-large-v3"])
    def test_what_is_not_known_is_said_and_not_guessed(self, model: str) -> None:
        peers = by_engine(model, length=448)
        for name in ("SGLang", "TensorRT-LLM V1", "TensorRT-LLM V2", "llama.cpp"):
            assert peers[name].unknown and peers[name].concurrency is None
            assert peers[name].note.startswith("Not known here")

    def test_formats_that_an_engine_lacks(self) -> None:
        peers = by_engine("gemma-4-31b", kv_cache_dtype="int8_per_token_head")
        assert "it has no" in (peers["SGLang"].error or "")
        assert "it has no" in (peers["TensorRT-LLM V1"].error or "")
        assert "q8_0" in (peers["llama.cpp"].unknown or "")

    def test_a_request_that_does_not_fit_is_less_than_one(self) -> None:
        for peer in reports(setting(kv_bytes=4 * GIB)):
            assert peer.error if peer.engine == "vLLM" else (peer.concurrency or 1) < 1


class TestStatesInVllm:
    def test_every_way_of_keeping_states_is_shown(self) -> None:
        peers = by_engine("qwen3.5-35b-a3b")
        mine, none, everything = (peers[f"vLLM 0.26+ {variant}"] for variant in ("async", "states none", "states all"))
        per_state = {peer.variant: peer.groups[0].blocks_per_request for peer in (mine, none, everything)}
        assert per_state == {"async": 2, "states none": 1, "states all": -(-131_072 // 1056)}
        assert [peer.same_flags for peer in (mine, none, everything)] == [True, False, False]
        assert [peer.alternative for peer in (mine, none, everything)] == [False, True, True]

    def test_without_prefix_caching_none_is_the_flag(self) -> None:
        peers = by_engine("qwen3.5-35b-a3b", enable_prefix_caching=False)
        assert peers["vLLM 0.26+ async"].groups[0].blocks_per_request == 1
        assert {"vLLM 0.26+ states align", "vLLM 0.26+ states all"} <= peers.keys()

    def test_models_without_states_have_no_such_rows(self) -> None:
        assert not any(peer.alternative for peer in reports(setting()))
