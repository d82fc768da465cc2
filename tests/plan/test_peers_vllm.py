from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windowpane.kv.caches import Cache, StateCache, StatePart, TokenCache
from windowpane.kv.retention import Chunk, Cross, Full, Window
from windowpane.models import load
from windowpane.plan.peers.report import PeerReport
from windowpane.plan.peers.vllm import (
    RELEASES,
    Group,
    LayerPage,
    Setting,
    admission_blocks,
    attention_block_tokens,
    block_bytes,
    bytes_per_token,
    group_layers,
    layer_pages,
    longest_model_len,
    report,
    reports,
    request_blocks,
    unify_pages,
)
from windowpane.plan.sizes import parse_bytes

GIB = 2**30
V0_20, V0_25, V0_26 = RELEASES

# Gemma 4 31B: every sixth layer is full and makes K and V from one projection.
SLIDING = TokenCache(0, Window(1024), kv_heads=16, key_dim=256, value_dim=256)
LATENT = TokenCache(0, Full(), kv_heads=4, key_dim=512, value_dim=512, latent=True)
GEMMA_4_31B = tuple(replace(LATENT if i % 6 == 5 else SLIDING, layer=i) for i in range(60))

# Qwen3.5 35B-A3B: three gated-delta layers (state in float32), then a full one.
DELTA = StateCache(0, (StatePart("conv", 1, 3 * 8192), StatePart("recurrent", 32, 128 * 128, "float32")))
FULL_256 = TokenCache(0, Full(), kv_heads=2, key_dim=256, value_dim=256)
QWEN_35B: tuple[Cache, ...] = tuple(
    replace(FULL_256, layer=i) if i % 4 == 3 else replace(DELTA, layer=i) for i in range(40)
)


def setting(caches: tuple[Cache, ...] = GEMMA_4_31B, **changes: object) -> Setting:
    base = Setting(
        caches=caches,
        kv_cache_dtype="auto",
        compute_dtype="bfloat16",
        kv_cache_bytes=50 * GIB,
        max_model_len=131_072,
        max_num_batched_tokens=2048,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def shape(peer: PeerReport) -> Counter[tuple[str, int, int]]:
    """How many groups there are of (retention, layers, block tokens)."""
    return Counter((g.name.split()[0], g.layers, g.block_tokens) for g in peer.groups)


GEMMA_GROUPS = Counter({("window-1024", 10, 16): 5, ("full", 10, 32): 1})


class TestWorkedExamples:
    def test_gemma_4_31b_on_two_3090s(self) -> None:
        tp2 = tuple(c.shard(2) for c in GEMMA_4_31B)
        peer = report(setting(tp2, kv_cache_bytes=parse_bytes("11.54GiB")), V0_20, False)
        assert shape(peer) == GEMMA_GROUPS
        assert peer.reported_tokens == 25_200
        assert f"{peer.concurrency:.2f}" == "1.87"

    def test_the_report_jumped_without_the_memory(self) -> None:
        before, after = (report(setting(), release, False) for release in (V0_20, V0_25))
        assert before.num_blocks == after.num_blocks == 20_480
        assert (before.reported_tokens, after.reported_tokens) == (54_608, 530_400)
        assert before.concurrency == after.concurrency
        assert before.groups == after.groups
        assert shape(before) == GEMMA_GROUPS

    def test_gemma_4_31b_on_an_h200(self) -> None:
        peer = report(setting(kv_cache_bytes=69_510_103_040, max_num_batched_tokens=16_384), V0_26, True)
        assert peer.num_blocks == 26_516
        assert peer.block_bytes == 2_621_440
        assert shape(peer) == GEMMA_GROUPS
        assert {g.blocks_per_request for g in peer.groups if g.layers == 10 and g.block_tokens == 16} == {2_113}
        assert peer.reported_tokens == 237_057
        assert f"{peer.concurrency:.2f}" == "1.81"

    def test_admission_budget_of_a_sliding_group(self) -> None:
        assert admission_blocks(16_001, 1024, 16) == 1_001
        assert admission_blocks(16_001, 1024, 16, chunk_tokens=8192) == 576

    @pytest.mark.parametrize(("dim", "head_token_bytes"), [(256, 520), (512, 1_032)])
    def test_per_token_head_bytes(self, dim: int, head_token_bytes: int) -> None:
        head = TokenCache(0, Full(), kv_heads=1, key_dim=dim, value_dim=dim)
        assert bytes_per_token(head, "int8_per_token_head") == head_token_bytes

    def test_qwen_3_5_blocks_grow_to_hold_a_state(self) -> None:
        assert attention_block_tokens(setting(QWEN_35B)) == 1_056
        peer = report(setting(QWEN_35B), V0_25, False)
        assert shape(peer) == Counter({("state", 10, 131_072): 3, ("full", 10, 1_056): 1})
        assert peer.block_bytes == 10 * 1_056 * 2_048
        assert [g.blocks_per_request for g in peer.groups] == [1, 1, 1, 125]
        assert "1,056 tokens" in peer.note

    def test_qwen_3_next_blocks_hold_a_bfloat16_state(self) -> None:
        half = replace(DELTA, parts=(DELTA.parts[0], replace(DELTA.parts[1], dtype=None)))
        assert attention_block_tokens(setting((half, FULL_256))) == 544


class TestBytes:
    def test_one_projection_is_stored_as_a_pair(self) -> None:
        assert (
            bytes_per_token(LATENT, "bfloat16") == bytes_per_token(replace(LATENT, latent=False), "bfloat16") == 8_192
        )

    def test_mla_is_one_vector(self) -> None:
        mla = TokenCache(0, Full(), kv_heads=1, key_dim=576, value_dim=0, latent=True, replicated=True)
        assert bytes_per_token(mla, "bfloat16") == 1_152

    @pytest.mark.parametrize(
        ("kv_dtype", "head_token_bytes"),
        [
            ("float16", 1024),
            ("fp8_e4m3", 512),
            ("fp8_e5m2", 512),
            ("fp8_per_token_head", 520),
            ("int4_per_token_head", 264),
        ],
    )
    def test_formats(self, kv_dtype: str, head_token_bytes: int) -> None:
        assert bytes_per_token(SLIDING, kv_dtype) == 16 * head_token_bytes


class TestPagesThatDoNotDivide:
    int8 = setting(kv_cache_dtype="int8_per_token_head")

    def test_0_20_0_refuses_to_start(self) -> None:
        peer = report(self.int8, V0_20, False)
        assert peer.error is not None
        assert "not divisible by the maximum page size" in peer.error
        assert (peer.reported_tokens, peer.concurrency, peer.groups) == (None, None, ())

    def test_later_ones_pad_without_longer_blocks(self) -> None:
        peer = report(self.int8, V0_26, True)
        assert shape(peer) == Counter({("window-1024", 10, 16): 5, ("full", 10, 16): 1})
        assert peer.block_bytes == 10 * 16 * 16 * 520
        full = next(g for g in peer.groups if g.name == "full")
        assert full.blocks_per_request == 8_192
        assert "padded" in peer.note

    def test_one_retention_shares_a_block_table_whatever_the_pages(self) -> None:
        index = TokenCache(1, Full(), kv_heads=1, key_dim=128, value_dim=0)
        mla = TokenCache(0, Full(), kv_heads=1, key_dim=576, value_dim=0)
        peer = report(setting((mla, index)), V0_20, False)
        assert [g.layers for g in peer.groups] == [2]
        assert peer.block_bytes == 16 * 2 * (576 + 128)

    @pytest.mark.parametrize(("dtype", "layer_bytes"), [("auto", 2 * 576 + 132), ("fp8", 656 + 132)])
    def test_indexers_of_deepseek_v3_2_keep_132_bytes_whatever_the_kv_dtype(self, dtype: str, layer_bytes: int) -> None:
        """128 values in uint8 and a float32 scale; fp8 latents have a layout of their own, with 656 bytes."""
        spec = load("deepseek-v3.2")
        peer = report(setting(spec.caches, family=spec.family, kv_cache_dtype=dtype), V0_26, True)
        assert peer.block_bytes == 16 * 61 * layer_bytes

    def test_fp8_is_what_vllm_means_by_it(self) -> None:
        named, meant = (report(setting(kv_cache_dtype=name), V0_26, True) for name in ("fp8", "fp8_e4m3"))
        assert named == meant and named.error is None


class TestGrouping:
    def test_close_kinds_share_the_larger_size(self) -> None:
        caches = tuple(replace(LATENT, layer=i) for i in range(13)) + tuple(
            replace(LATENT, layer=13 + i, retention=Window(128)) for i in range(12)
        )
        peer = report(setting(caches), V0_25, False)
        assert [(g.layers, g.padded_layers) for g in peer.groups] == [(13, 0), (12, 1)]

    def test_far_kinds_are_dealt_in_the_smaller_size(self) -> None:
        # Gemma 3 27B: 52 sliding, 10 full. Six sliding groups of ten places hold 52 layers.
        caches = tuple(replace(LATENT, layer=i, retention=Full() if i % 6 == 5 else Window(1024)) for i in range(62))
        peer = report(setting(caches), V0_25, False)
        sliding = [g for g in peer.groups if g.name.startswith("window")]
        assert [g.layers for g in sliding] == [9, 9, 9, 9, 8, 8]
        assert [g.padded_layers for g in sliding] == [1, 1, 1, 1, 2, 2]
        assert "empty layers" in peer.note

    def test_a_dense_model_is_one_group_that_reports_all_its_tokens(self) -> None:
        dense = tuple(TokenCache(i, Full(), kv_heads=8, key_dim=128, value_dim=128) for i in range(36))
        old, new = (report(setting(dense, max_model_len=32_768), r, False) for r in (V0_20, V0_25))
        assert old.num_blocks == 50 * GIB // (36 * 16 * 4096)
        assert old.reported_tokens == new.reported_tokens == old.num_blocks * 16


class TestCharges:
    def charge(self, cache: Cache, *, in_flight: int = 2048, **changes: object) -> int:
        block_tokens = 16
        group = Group("g", (LayerPage(cache, block_tokens, 1),), 1)
        return request_blocks(group, setting((cache,), **changes), in_flight)

    def test_chunked_attention_has_no_straddling_block(self) -> None:
        llama_4 = TokenCache(0, Chunk(8192), kv_heads=8, key_dim=128, value_dim=128)
        assert self.charge(llama_4) == (8192 + 2048) // 16

    def test_cross_attention_is_charged_its_encoder_tokens(self) -> None:
        whisper = TokenCache(0, Cross(1500), kv_heads=20, key_dim=64, value_dim=64)
        assert self.charge(whisper, max_model_len=448) == 94

    @pytest.mark.parametrize(("mode", "blocks"), [("none", 1), ("align", 2), ("all", 8_192)])
    def test_states_by_cache_mode(self, mode: str, blocks: int) -> None:
        assert self.charge(DELTA, mamba_cache_mode=mode) == blocks

    @settings(deadline=None)
    @given(st.integers(1, 200), st.integers(1, 100), st.integers(1, 400))
    def test_a_window_is_charged_at_most_one_block_more_than_it_can_touch(
        self, window: int, batch: int, length: int
    ) -> None:
        touched = 0
        for start in range(length):  # the batch computes tokens start, start + 1, ...
            first, end = max(0, start - window + 1), min(start + batch, length)
            touched = max(touched, (end - 1) // 16 - first // 16 + 1)
        cache = TokenCache(0, Window(window), kv_heads=1, key_dim=64, value_dim=64)
        assert 0 <= self.charge(cache, in_flight=batch, max_model_len=length) - touched <= 1

    def test_only_0_26_charges_for_batches_in_flight(self) -> None:
        by_release = {(p.version, p.async_scheduling): p.bytes_per_request for p in reports(setting())}
        assert list(by_release) == [("0.20.0", None), ("0.25.0", None), ("0.26.0", False), ("0.26.0", True)]
        assert by_release["0.25.0", None] == by_release["0.26.0", False]
        extra_blocks = 5 * 2048 // 16
        assert by_release["0.26.0", True] == by_release["0.26.0", False] + extra_blocks * 2_621_440  # type: ignore[operator]


class TestRefusals:
    def error(self, release_index: int = -1, **changes: object) -> str:
        peer = report(setting(**changes), RELEASES[release_index], True)  # type: ignore[arg-type]
        assert (peer.reported_tokens, peer.concurrency) == (None, None)
        assert peer.error is not None
        assert peer.error in peer.note
        return peer.error

    def test_a_length_that_does_not_fit_names_the_longest_that_does(self) -> None:
        small = setting(kv_cache_bytes=10 * GIB)
        error = self.error(kv_cache_bytes=10 * GIB)
        assert error.startswith("KV cache too small: one request of 131,072 tokens needs 13.92 GiB and 10.00 GiB is")
        longest = int(error.rsplit(" ", 1)[1].replace(",", ""))
        assert report(replace(small, max_model_len=longest), V0_26, True).error is None
        assert report(replace(small, max_model_len=longest + 1), V0_26, True).error is not None

    def test_no_memory_at_all(self) -> None:
        assert "no max_model_len fits" in self.error(kv_cache_bytes=1)

    def test_formats_per_group(self) -> None:
        assert "whole model" in self.error(kv_cache_dtype="full=int8_per_token_head,window=bfloat16")

    def test_formats_it_does_not_know(self) -> None:
        assert "no --kv-cache-dtype int4_per_token_head" in self.error(0, kv_cache_dtype="int4_per_token_head")
        assert report(setting(kv_cache_dtype="int4_per_token_head"), V0_26, True).error is None
        assert "no --kv-cache-dtype float32" in self.error(kv_cache_dtype="float32")
        assert report(setting(compute_dtype="float32"), V0_26, False).error is None

    def test_e5m2_with_quantized_weights(self) -> None:
        assert "not supported with fp8 checkpoints" in self.error(kv_cache_dtype="fp8_e5m2", quantized_checkpoint=True)
        assert report(setting(kv_cache_dtype="fp8_e5m2"), V0_20, False).error is None

    def test_fp8_per_token_head_before_ada(self) -> None:
        assert "SM 8.6" in self.error(kv_cache_dtype="fp8_per_token_head", capability=(8, 6))
        assert report(setting(kv_cache_dtype="fp8_per_token_head", capability=(8, 9)), V0_26, True).error is None

    def test_per_token_head_with_mla(self) -> None:
        mla = TokenCache(0, Full(), kv_heads=1, key_dim=576, value_dim=0)
        assert "MLA" in self.error(caches=(mla,), kv_cache_dtype="int8_per_token_head")

    def test_settings_that_mean_nothing(self) -> None:
        with pytest.raises(ValueError, match="at least one cache"):
            setting(())
        with pytest.raises(ValueError, match=r"max_model_len \(0\)"):
            setting(max_model_len=0)


token_caches = st.builds(
    TokenCache,
    layer=st.just(0),
    retention=st.sampled_from([Full(), Window(128), Window(1024), Chunk(512), Cross(100)]),
    kv_heads=st.sampled_from([1, 2, 8]),
    key_dim=st.sampled_from([64, 128, 192, 256]),
    value_dim=st.sampled_from([64, 128]),
)
state_caches = st.builds(
    lambda elements: StateCache(0, (StatePart("s", 4, elements),)), st.sampled_from([100, 4096, 65_536])
)
repeated = st.tuples(token_caches | state_caches, st.integers(1, 20)).map(lambda part: [part[0]] * part[1])
mixes = st.lists(repeated, min_size=1, max_size=4).map(
    lambda parts: tuple(replace(cache, layer=i) for i, cache in enumerate(c for part in parts for c in part))
)
kv_dtypes = st.sampled_from(["auto", "fp8_e4m3", "int8_per_token_head"])


@settings(deadline=None)
@given(mixes, kv_dtypes)
def test_grouping_covers_every_cache_once_in_groups_of_one_kind(caches: tuple[Cache, ...], kv_dtype: str) -> None:
    one = setting(caches, kv_cache_dtype=kv_dtype)
    groups = group_layers(unify_pages(layer_pages(one), V0_26))
    assert sorted(p.cache.layer for g in groups for p in g.pages) == list(range(len(caches)))
    assert len({g.places for g in groups}) == 1
    for group in groups:
        assert 1 <= len(group.pages) <= group.places
        assert len({p.retention for p in group.pages}) == 1
        assert len({p.block_tokens for p in group.pages}) == 1


@settings(deadline=None)
@given(mixes, kv_dtypes)
def test_a_block_holds_a_page_of_every_layer_and_pages_hold_their_tokens(
    caches: tuple[Cache, ...], kv_dtype: str
) -> None:
    one = setting(caches, kv_cache_dtype=kv_dtype)
    groups = group_layers(unify_pages(layer_pages(one), V0_26))
    for group in groups:
        assert sum(p.page_bytes for p in group.pages) <= block_bytes(groups)
        for page in group.pages:
            if isinstance(page.cache, StateCache):
                assert page.page_bytes >= page.cache.bytes("bfloat16")
            else:
                assert page.page_bytes >= page.block_tokens * bytes_per_token(page.cache, one.kv_dtype)
                assert page.block_tokens % 16 == 0


@settings(deadline=None)
@given(mixes, kv_dtypes, st.integers(1, 4000), st.integers(0, 2**28), st.booleans())
def test_what_starts_fits_and_what_does_not_says_so(
    caches: tuple[Cache, ...], kv_dtype: str, length: int, kv_bytes: int, async_scheduling: bool
) -> None:
    one = setting(caches, kv_cache_dtype=kv_dtype, max_model_len=length, kv_cache_bytes=kv_bytes)
    peer = report(one, V0_26, async_scheduling)
    assert peer.bytes_per_request == sum(g.bytes_per_request for g in peer.groups)
    assert (peer.error is None) == (peer.bytes_per_request <= kv_bytes)
    if peer.error is None:
        assert peer.concurrency is not None and peer.concurrency >= 1
        assert peer.reported_tokens is not None and peer.reported_tokens >= length


@settings(deadline=None)
@given(mixes, st.integers(1, 600), st.integers(0, 300))
def test_the_longest_length_is_the_one_a_linear_search_finds(
    caches: tuple[Cache, ...], length: int, blocks: int
) -> None:
    one = setting(caches, max_model_len=length)
    groups = group_layers(unify_pages(layer_pages(one), V0_26))

    def needed(tokens: int) -> int:
        return sum(request_blocks(g, replace(one, max_model_len=tokens), 64) for g in groups)

    fitting = [n for n in range(1, length + 1) if needed(n) <= blocks]
    assert longest_model_len(one, groups, blocks, 64) == max(fitting, default=0)
