"""Engines with models that draft, started as users start them: answers, acceptance and bytes, on a GPU.

What the models draft is compared with plain torch in `engine` (`bench.gpu_check drafting assistant layer`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu_checks.engine import ITSELF, OWN_LAYER, greedy
from bench.known_drafts import Eager
from tests.running.small_models import CONFIGS, QUANTIZED
from windowpane.drafts.drafter import ModelDrafter
from windowpane.engine.accounts import accounts
from windowpane.engine.start import Started, start

CASES = (
    ("qwen3.5", OWN_LAYER), ("qwen3-next", OWN_LAYER), ("gemma4 everything", ITSELF), ("qwen3", ITSELF),
)  # fmt: skip
DRAFTS, NEW_TOKENS, LENGTHS = 3, 48, (1, 5, 40, 130)
LEAST_ACCEPTED = {"float32": 0.98, "bfloat16": 0.8}  # of what a model drafts for itself: two tokens may be as likely


def checks() -> list[tuple[str, Callable[[], str]]]:
    return [
        (f"drafters started in {dtype}, {who}: {name}", partial(answers_stay, name, who, dtype))
        for name, who in CASES
        for dtype in ("float32", "bfloat16")
    ]


def answers_stay(
    name: str, who: str, dtype: str, device: str = "cuda", lengths: tuple[int, ...] = LENGTHS, new: int = NEW_TOKENS,
    **flags: Any,
) -> str:  # fmt: skip
    """Greedy answers with all drafts verified and with none; in float32 they are the same, token by token."""
    sizes = {"max_model_len": max(lengths) + new, "max_num_seqs": len(lengths)}
    started = started_with(name, who, dtype, device, **sizes, **flags)
    try:
        engine, plan = started.engine, started.plan
        assert engine.speculator is not None and isinstance(engine.speculator.drafter, ModelDrafter)
        drafting, engine.speculator = Eager(engine.speculator.drafter, DRAFTS), None
        plain = greedy(engine, lengths, new)
        engine.speculator = drafting
        drafted = greedy(engine, lengths, new)
        same, stats = sum(a == b for a, b in zip(plain, drafted, strict=True)), drafting.stats
        if dtype == "float32" and same < len(plain):
            raise AssertionError(f"{len(plain) - same} of {len(plain)} answers differ with drafts")
        share = stats.accepted_tokens / max(stats.draft_tokens, 1)
        least = 0.0 if who == OWN_LAYER else LEAST_ACCEPTED[dtype]
        if stats.draft_tokens < new or share < least:
            raise AssertionError(f"{stats.accepted_tokens} of {stats.draft_tokens} drafts accepted")
        books = {row.name: row for row in accounts(plan, started.reports)}
        activations = books.pop("activations", None)  # an estimate
        for row in books.values():
            if row.measured_bytes != row.predicted_bytes:
                raise AssertionError(f"{row.name}: planned {row.predicted_bytes:,} bytes, {row.measured_bytes:,} taken")
    finally:
        started.close()
    told = f"{same} of {len(plain)} answers the same, {share:.0%} of {stats.draft_tokens} drafts accepted"
    if activations is not None:
        told += f", activations {activations.measured_bytes / activations.predicted_bytes:.2f} of the estimate"
    return told


def started_with(name: str, who: str, dtype: str, device: str, **flags: Any) -> Started:
    """The engine of a small model with random weights, and its drafter."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps((CONFIGS | QUANTIZED)[name]))
        drafting: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": DRAFTS}
        if who == ITSELF:
            drafting |= {"method": "draft_model", "model": directory}
        common = {
            "device": device, "dtype": dtype, "load_format": "dummy", "speculative_config": drafting, "seed": 3,
            "max_num_batched_tokens": 64, "enable_prefix_caching": False, "kv_cache_memory_bytes": 2**26,
        }  # fmt: skip
        return start(directory, {**common, **flags})
