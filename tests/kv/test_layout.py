from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.strategies import caches_of_one_model, layouts
from windowpane.kv.caches import ShardingError, StateCache, StatePart, TokenCache
from windowpane.kv.formats import FORMATS, kv_format
from windowpane.kv.layout import (
    OFFSET_UNIT_BYTES,
    LayoutError,
    group_caches,
    plan_layout,
    resolve_formats,
)
from windowpane.kv.retention import Full, State, Window


def gemma_4_31b(ranks: int = 1) -> list[TokenCache]:
    def layer(i: int) -> TokenCache:
        if i % 6 == 5:
            return TokenCache(i, Full(), 4, 512, 512, latent=True)
        return TokenCache(i, Window(1024), 16, 256, 256)

    return [layer(i).shard(ranks) for i in range(60)]


def layout_of(caches, choice="auto", compute_dtype="bfloat16", **overrides):
    return plan_layout(caches, resolve_formats(choice, group_caches(caches), compute_dtype), compute_dtype, **overrides)


@given(layouts())
def test_slices_of_a_page_do_not_overlap_and_lie_inside_it(layout):
    for group in layout.groups:
        assert group.page_bytes % OFFSET_UNIT_BYTES == 0
        for stripe in range(group.stripes):
            spans = []
            for s in (s for s in group.slices if s.stripe == stripe):
                rows = s.cache.kv_heads * group.block_tokens if isinstance(s.cache, TokenCache) else 1
                spans += [(at, at + rows * width) for at, width in zip(s.data_offsets, s.row_bytes, strict=True)]
                spans += [(at, at + rows * group.kv_format.scale_bytes) for at in s.scale_offsets]
                assert all(at % 16 == 0 for at in s.data_offsets)
            spans.sort()
            assert all(a_end <= b for (_, a_end), (b, _) in itertools.pairwise(spans))
            assert spans[-1][1] <= group.page_bytes


@given(caches_of_one_model(), st.sampled_from(list(FORMATS)))
def test_every_cache_is_in_the_group_of_its_retention_once(caches, fmt):
    layout = layout_of(caches, fmt)
    assert len({g.retention for g in layout.groups}) == len(layout.groups)
    placed = [s.cache for g in layout.groups for s in g.slices]
    assert sorted(c.layer for c in placed) == [c.layer for c in caches]
    assert all(s.cache.retention == g.retention for g in layout.groups for s in g.slices)


@given(layouts())
def test_pages_lie_at_whole_rows_of_every_width(layout):
    """TMA counts rows: an offset into a slab must be a whole number of each layer's rows."""
    for g in layout.groups:
        for s in (s for s in g.slices if isinstance(s.cache, TokenCache)):
            assert all(g.page_bytes % width == 0 and layout.slab_bytes % width == 0 for width in s.row_bytes)


def test_an_odd_number_of_scaled_layers_keeps_pages_at_whole_rows():
    layout = layout_of([TokenCache(i, Full(), 4, 512, 512, latent=True) for i in range(9)], "int8_per_token_head")
    assert layout.groups[0].page_bytes % 512 == 0


@given(layouts())
def test_a_slab_holds_at_least_one_page_of_every_group(layout):
    assert all(layout.pages_per_slab(g) >= 1 for g in layout.groups)


@given(layouts())
def test_a_page_costs_no_more_than_its_rows_and_alignment(layout):
    """No padding to a common page: what a page holds beyond its data is alignment of slices and of the page."""
    for g in layout.groups:
        if isinstance(g.retention, State):
            continue
        data = 0
        for s in g.slices:
            rows = s.cache.kv_heads * g.block_tokens
            data += rows * (sum(s.row_bytes) + g.kv_format.scale_bytes * len(s.row_bytes))
        slack = g.stripes * g.align_bytes + 16 * g.layers
        assert g.stripes * g.page_bytes <= 1.01 * data + slack


@pytest.mark.parametrize(("choice", "head_token_bytes"), [("bfloat16", 1024), ("int8_per_token_head", 520)])
def test_256_dim_layers_cost_what_their_format_says(choice, head_token_bytes):
    window = layout_of(gemma_4_31b(), choice).group("window-1024")
    assert window.bytes_per_token == 50 * 16 * head_token_bytes


def test_512_dim_latent_layers_cost_one_vector_and_one_scale():
    full = layout_of(gemma_4_31b(), "int8_per_token_head").group("full")
    assert full.bytes_per_token == 10 * 4 * (512 + 4)


def test_page_sizes_with_no_common_divisor_start_up():
    """520 and 1,032 bytes per head-token: the ratio that makes others refuse."""
    pair = [
        TokenCache(0, Full(), 4, 512, 512),
        *(TokenCache(i, Window(1024), 16, 256, 256) for i in range(1, 6)),
    ]
    layout = layout_of(pair, "int8_per_token_head")
    assert layout.group("full").bytes_per_token == 4 * 1032
    assert layout.group("window-1024").bytes_per_token == 5 * 16 * 520
    assert all(layout.remainder_bytes(g) <= 0.01 * layout.slab_bytes for g in layout.groups)


def test_layers_of_different_widths_share_a_group_without_padding_to_the_widest():
    caches = [TokenCache(0, Full(), 2, 64, 64), TokenCache(1, Full(), 8, 256, 256)]
    group = layout_of(caches).group("full")
    assert group.bytes_per_token == 2 * 2 * 64 * 2 + 8 * 2 * 256 * 2


def test_a_page_beyond_16_mib_is_cut_into_stripes():
    window = layout_of(gemma_4_31b(), "float32", "float32").group("window-1024")
    assert window.stripes > 1
    assert window.page_bytes <= 16 * 2**20
    assert window.bytes_per_token == 50 * 16 * 2048


def test_tensor_parallel_halves_a_page():
    one, two = layout_of(gemma_4_31b()), layout_of(gemma_4_31b(ranks=2))
    assert [2 * g.bytes_per_token for g in two.groups] == [g.bytes_per_token for g in one.groups]


def test_kv_heads_replicate_when_ranks_outnumber_them():
    assert TokenCache(0, Full(), 2, 64, 64).shard(8).kv_heads == 1
    assert StateCache(0, (StatePart("r", 4, 10),)).shard(8).parts[0].heads == 1


def test_replicated_latents_are_whole_on_every_rank():
    assert TokenCache(0, Full(), 1, 576, 0, latent=True, replicated=True).shard(8).key_dim == 576


def test_heads_that_do_not_divide_are_an_error_that_names_them():
    with pytest.raises(ShardingError, match=r"6 KV heads of layer 3 .* 4 tensor-parallel ranks"):
        TokenCache(3, Full(), 6, 64, 64).shard(4)


def test_state_pages_hold_one_layer():
    caches = [StateCache(i, (StatePart("conv", 8, 30), StatePart("recurrent", 8, 4096, "float32"))) for i in range(5)]
    group = layout_of(caches).group("state")
    assert group.stripes == 5
    assert group.max_pages(1) == group.max_pages(10**6) == 2 * 5
    assert group.page_bytes >= 8 * 30 * 2 + 8 * 4096 * 4


def test_formats_per_group_by_kind_or_name():
    retentions = [Full(), Window(128), Window(512)]
    chosen = resolve_formats("window=int8_per_token_head,window-512=fp8_e4m3", retentions, "bfloat16")
    assert {k: f.name for k, f in chosen.items()} == {
        "full": "bfloat16",
        "window-128": "int8_per_token_head",
        "window-512": "fp8_e4m3",
    }


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("int3", "unknown KV dtype 'int3'"),
        ("window=int9", "unknown KV dtype 'int9'"),
        ("chunk=bfloat16", "no group 'chunk'"),
        ("full=bfloat16,full=float16", "given twice"),
    ],
)
def test_bad_kv_dtypes_are_named(choice, message):
    with pytest.raises(ValueError, match=message):
        resolve_formats(choice, [Full(), Window(8)], "bfloat16")


def test_int4_rows_stay_16_byte_aligned():
    assert kv_format("int4_per_token_head").row_bytes(256) == 128
    assert kv_format("int4_per_token_head").row_bytes(72) == 48


def test_overrides_are_honoured_or_refused():
    layout = layout_of(gemma_4_31b(), block_tokens=64, slab_bytes=64 * 2**20)
    assert layout.slab_bytes == 64 * 2**20
    assert all(g.block_tokens == 64 for g in layout.groups)
    with pytest.raises(LayoutError, match="cannot hold one page"):
        layout_of(gemma_4_31b(), slab_bytes=1024)
    with pytest.raises(LayoutError, match="multiple of 1024"):
        layout_of(gemma_4_31b(), slab_bytes=1000)
    with pytest.raises(LayoutError, match="at least 1"):
        layout_of(gemma_4_31b(), block_tokens=0)
    with pytest.raises(LayoutError, match="nothing to lay out"):
        layout_of([])


@settings(max_examples=20)
@given(layouts())
def test_a_layout_explains_itself_group_by_group(layout):
    lines = layout.explain()
    assert len(lines) == len(layout.groups) + 1
    assert all(g.name in line for g, line in zip(layout.groups, lines, strict=False))
