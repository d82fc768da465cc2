"""Every KV format through scheduler, manager and runner: what is stored is what is attended, however it is paged."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
import torch

from tests.running.harness import Knobs, Run, generate
from tests.running.small_models import WINDOW, spec_of, weights_of
from tests.running.test_against_transformers import prompt
from windowpane.device.pages import KEYS, QUERIES, KVPages
from windowpane.kv.formats import FORMATS
from windowpane.kv.layout import Layout, group_caches, plan_layout, resolve_formats
from windowpane.lowering.linear import Parameters
from windowpane.lowering.reference.model import ReferenceModel
from windowpane.lowering.scales import Calibration, settle_scales
from windowpane.models.running import runnable
from windowpane.runners.plain import Runner

NEW_TOKENS = 16
LOSSY = [name for name in FORMATS if name != "float32"]
CODED = [name for name, fmt in FORMATS.items() if fmt.family != "float"]
MIXES = ("gemma3", "gemma4 K = V", "gemma4 everything")  # pairs in windows and full groups; latents; shared KV
# Sums in another order differ by an ulp, which now and then takes a number to the next code. So logits may move, but
# by a small share of what the format itself moves them; a present attended before it is coded moves them by as much.
FLIP_SHARE = 0.4


@cache
def alone(name: str, kv_cache_dtype: str) -> tuple[list[int], torch.Tensor]:
    run = generate(name, [prompt(1, 77)], NEW_TOKENS, Knobs(kv_cache_dtype=kv_cache_dtype))
    return run.outputs[0], torch.stack(run.logits[0])


def effect(name: str, kv_cache_dtype: str) -> float:
    """By how much the format moves logits, of tokens up to where outputs part."""
    (output, logits), (plain_output, plain_logits) = alone(name, kv_cache_dtype), alone(name, "auto")
    same = 1 + next((i for i, (a, b) in enumerate(zip(output, plain_output, strict=True)) if a != b), NEW_TOKENS - 1)
    return float((logits[:same] - plain_logits[:same]).abs().max())


def worst_difference(run: Run, name: str, kv_cache_dtype: str, index: int = 0) -> float:
    """Over all tokens up to where outputs part, which they only may where the margin is not clear."""
    output, logits = alone(name, kv_cache_dtype)
    same = [a == b for a, b in zip(run.outputs[index], output, strict=True)]
    parted_at = same.index(False) if False in same else NEW_TOKENS
    assert parted_at >= 4, "hardly anything is equal"
    if parted_at < NEW_TOKENS:
        first, second = logits[parted_at].topk(2).values
        assert first - second <= 2 * FLIP_SHARE * effect(name, kv_cache_dtype), (
            f"token {parted_at} differs although its margin is clear"
        )
    return float((torch.stack(run.logits[index][:parted_at]) - logits[:parted_at]).abs().max())


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("kv_cache_dtype", [*LOSSY, "full=int8_per_token_head,window=int4_per_token_head"])
def test_chunks_blocks_and_preemption_change_nothing(name, kv_cache_dtype):
    trials = [
        Knobs(chunk_tokens=1, num_slots=1, kv_cache_dtype=kv_cache_dtype),
        Knobs(chunk_tokens=WINDOW + 1, block_tokens=16, kv_cache_dtype=kv_cache_dtype),
        Knobs(chunk_tokens=17, block_tokens=64, slab_bytes=2**20, kv_cache_dtype=kv_cache_dtype),
        Knobs(chunk_tokens=33, block_tokens=1, kv_cache_dtype=kv_cache_dtype),
    ]
    runs = [generate(name, [prompt(1, 77)], NEW_TOKENS, knobs) for knobs in trials]
    mates = [prompt(1, 77), prompt(2, 60), prompt(3, 40)]
    crowded = Knobs(chunk_tokens=40, block_tokens=16, room=1.6, growth_tokens=4, kv_cache_dtype=kv_cache_dtype)
    runs.append(generate(name, mates, NEW_TOKENS, crowded))
    most = effect(name, kv_cache_dtype)
    assert max(worst_difference(run, name, kv_cache_dtype) for run in runs) <= FLIP_SHARE * most
    first = [alone(name, kv_cache_dtype)[1][0], *(run.logits[0][0] for run in runs)]
    closest = min(float((a - b).abs().max()) for a, b in combinations(first, 2))
    assert closest <= 0.02 * most, "every way of running differs from every other"


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("kv_cache_dtype", CODED)
def test_a_format_changes_logits_as_little_as_it_promises(name, kv_cache_dtype):
    """And does change them: otherwise nothing was stored in it."""
    plain = alone(name, "auto")[1][0]
    change = float((alone(name, kv_cache_dtype)[1][0] - plain).norm() / plain.norm())
    most = {"int8_per_token_head": 0.05, "fp8_per_token_head": 0.2, "fp8_e4m3": 0.2}.get(kv_cache_dtype, 0.6)
    assert 1e-4 < change < most


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("kv_cache_dtype", CODED)
def test_a_prompt_resumes_in_coded_tails(name, kv_cache_dtype):
    """Tails of restore points within one chunk are written beside what the chunk itself keeps."""
    stem = prompt(1, 70)
    prompts = [stem + prompt(2, 30), stem + prompt(3, 25)]
    keeping = Knobs(block_tokens=16, keep=True, one_by_one=True, message_ends=(20, 70), kv_cache_dtype=kv_cache_dtype)
    run = generate(name, prompts, 1, keeping)
    assert [request.cached_tokens for request in run.requests] == [0, 70]
    without = generate(name, prompts[1:], 1, Knobs(kv_cache_dtype=kv_cache_dtype))
    difference = float((run.logits[1][0] - without.logits[0][0]).abs().max())
    assert difference <= FLIP_SHARE * effect(name, kv_cache_dtype)


def layout_of(name: str, kv_cache_dtype: str) -> Layout:
    caches = list(spec_of(name).caches)
    return plan_layout(caches, resolve_formats(kv_cache_dtype, group_caches(caches), "float32"), "float32")


def pages_of(name: str, kv_cache_dtype: str) -> KVPages:
    return KVPages(layout_of(name, kv_cache_dtype), 4, 2, 64, torch.device("cpu"))


def runner_of(name: str, kv_cache_dtype: str, kv_scales: dict[int, tuple[float, float]]) -> Runner:
    layout, cpu, known = layout_of(name, kv_cache_dtype), torch.device("cpu"), Calibration(kv_scales)
    weights = weights_of(name)
    return Runner(spec_of(name), weights, layout, 4, 2, 64, device=cpu, dtype=torch.float32, calibration=known)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_layer_scales_come_from_the_checkpoint_or_a_warm_up_pass(kv_cache_dtype):
    layers = runner_of("gemma4 K = V", kv_cache_dtype, {0: (0.5, 0.25), 2: (0.5, 0.125)}).pages.layers
    assert layers[0].layer_scales == [0.5, 0.25]
    assert layers[2].layer_scales == [0.125], "a latent is V before it is K"
    most = {"fp8_e4m3": 448, "fp8_e5m2": 57344}[kv_cache_dtype]
    for index in (1, 3, 4, 5):
        assert layers[index].layer_scales is not None
        # Norms keep every vector's length: its largest number lies between 1 and the root of its dims, with norms' own
        # weights near 1.
        assert all(0.5 < scale * most < 2 * 3 * 64**0.5 for scale in layers[index].layer_scales)
    assert not any(layer.warming_up for layer in layers.values())


def test_a_balance_evens_out_what_keys_have_and_queries_lack(monkeypatch):
    """Scores stay what they are; only what coding them costs shrinks."""
    torch.manual_seed(0)
    layer = pages_of("gemma3", "int4_per_token_head").layers[0]
    heads, dim = 2, 32
    spread = torch.logspace(-1.5, 1.5, dim // 2)[torch.randperm(dim // 2)].repeat(2)
    keys, queries = torch.randn(200, heads, dim) * spread, torch.randn(200, heads * 2, dim) / spread
    exact = torch.einsum("qhgd,khd->qhgk", queries.view(200, heads, 2, dim), keys)

    def error() -> float:
        coded = layer.through_format(layer.balanced(keys, KEYS), 0)
        asking = layer.balanced(queries, QUERIES).view(200, heads, 2, dim)
        return float((torch.einsum("qhgd,khd->qhgk", asking, coded) - exact).norm() / exact.norm())

    with monkeypatch.context() as alike:
        alike.setattr(layer, "balance", torch.ones(2, heads, dim))
        unbalanced = error()
    assert layer.warming_up
    layer.balanced(keys, KEYS)
    layer.balanced(queries, QUERIES)
    layer.end_warm_up()
    assert error() < min(0.2, unbalanced / 10)


def test_the_warm_up_text_is_what_the_balance_is_made_of():
    found = []
    for tokens in ((), (), range(2, 60)):
        pages = pages_of("gemma3", "int8_per_token_head")
        decoder = runnable(spec_of("gemma3"))
        model = ReferenceModel(decoder, Parameters(decoder, weights_of("gemma3")), 256)
        settle_scales(model, pages, Calibration(tokens=list(tokens)))
        found.append(pages.layers[0].balance)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.allclose(found[0][0] * found[0][1], torch.ones_like(found[0][0])), "scores must not change"
