"""`--fit`: the least lossy KV formats with which so many sequences fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from windowpane.kv.decoded_past import TOGETHER_BYTES
from windowpane.models import load
from windowpane.plan import quality
from windowpane.plan.config import ConfigError, EngineConfig
from windowpane.plan.planner import Plan, PlanError, make_plan
from windowpane.plan.quality import Fit, loss

KV_BYTES = int(64.74 * 2**30)


def fitted(fit: str, name: str = "gemma-4-31b", kv_bytes: int = KV_BYTES) -> Plan:
    return make_plan(load(name), EngineConfig(fit=fit, kv_cache_memory_bytes=kv_bytes))


def formats(plan: Plan) -> dict[str, str]:
    return {g.name: g.kv_format.name for g in plan.sizing.layout.groups if g.kv_format}


def test_what_fits_as_it_is_stays_as_it_is() -> None:
    assert set(formats(fitted("8x131072")).values()) == {"bfloat16"}


@pytest.mark.parametrize(("fit", "sequences"), [("16x131072", 16), ("20x128K", 20), ("30x131072", 30)])
def test_more_sequences_take_lossier_formats_and_then_fit(fit: str, sequences: int) -> None:
    plan = fitted(fit)
    assert plan.capacity is not None and plan.capacity.sequences(131072) >= sequences
    assert plan.max_model_len == 131072


def test_no_less_lossy_choice_would_have_fitted() -> None:
    plan = fitted("16x131072")
    chosen = sum(loss(g, g.kv_format.name) for g in plan.sizing.layout.groups if g.kv_format)
    for full in ("bfloat16", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"):
        for window in ("bfloat16", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"):
            config = EngineConfig(kv_cache_dtype=f"full={full},window={window}", kv_cache_memory_bytes=KV_BYTES)
            other = make_plan(load("gemma-4-31b"), config)
            lost = sum(loss(g, g.kv_format.name) for g in other.sizing.layout.groups if g.kv_format)
            assert other.capacity is not None
            assert lost >= chosen or other.capacity.sequences(131072) < 16


def test_a_latent_counts_for_more_than_a_pair() -> None:
    groups = fitted("1x1024").sizing.layout.groups
    full = next(g for g in groups if g.grows)
    pairs = replace(full, slices=tuple(replace(s, cache=replace(s.cache, latent=False)) for s in full.slices))
    assert loss(full, "int8_per_token_head") > loss(pairs, "int8_per_token_head") > 0


def test_others_are_compared_with_what_they_would_do_unasked() -> None:
    """Formats per group are ours alone; vLLM and the rest are shown with `auto`."""
    plain = make_plan(load("gemma-4-31b"), EngineConfig(max_model_len=131_072), gpu="h200")
    squeezed = make_plan(load("gemma-4-31b"), EngineConfig(fit="16x131072"), gpu="h200")
    for mine, other in zip(plain.peers, squeezed.peers, strict=True):
        assert mine.error is None and other.error is None
        assert mine.block_bytes == other.block_bytes and mine.unknown == other.unknown


def test_what_never_fits_says_how_many_do() -> None:
    with pytest.raises(PlanError, match=r"at most \d+ do; write --fit \d+x131072"):
        fitted("500x131072")
    with pytest.raises(PlanError, match="add --gpu or --kv-cache-memory-bytes"):
        make_plan(load("gemma-4-31b"), EngineConfig(fit="2x1024"))


def test_flags_that_contradict_or_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="leave one out"):
        EngineConfig(fit="2x1024", kv_cache_dtype="bfloat16")
    for text in ("16", "x", "16x", "0x100", "ax12", "16x12q"):
        with pytest.raises(ConfigError, match="--fit"):
            Fit.parse(text)
    assert Fit.parse("16×128K") == Fit(16, 131072)


def test_scratch_for_a_decoded_past_is_part_of_the_plan() -> None:
    """One layer's longest past in bfloat16: of Gemma 4 31B the latents', four heads of 512 dims."""
    spec = load("gemma-4-31b")
    plain, coded = (
        make_plan(spec, EngineConfig(kv_cache_dtype=name, max_model_len=131072), gpu="h200").budget
        for name in ("auto", "int8_per_token_head")
    )
    assert plain is not None and coded is not None
    assert coded.activation_bytes - plain.activation_bytes == 131072 * 4 * 512 * 2
    windows = make_plan(spec, EngineConfig(kv_cache_dtype="full=auto,window=int8_per_token_head"), gpu="h200").budget
    assert windows is not None and windows.activation_bytes - plain.activation_bytes >= TOGETHER_BYTES


def test_the_quality_table_of_the_documentation_is_what_was_measured() -> None:
    document = (Path(__file__).parents[2] / "docs" / "kv-formats.md").read_text("utf-8")
    measured = json.loads(Path(quality.__file__).with_name(quality.FIGURES).read_text("utf-8"))
    for name, found in measured["formats"].items():
        change, error, divergence = (found[key] for key in ("perplexity_change", "standard_error", "divergence"))
        counts = f"{found['contexts']} | {found['scored_tokens']:,}"
        assert f"| `{name}` | {counts} | {change:+.2%} ± {error:.2%} | {divergence:.3%} |" in document
    assert f"perplexity {measured['perplexity']} with float32 KV" in document
