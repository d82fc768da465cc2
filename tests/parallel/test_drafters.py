"""Models draft on two ranks as on one: they change no token, and what a model drafts for itself is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu_checks.engine import assistant_of
from tests.parallel.checkpoints import write_checkpoint
from tests.parallel.ranks import Model, assert_same
from tests.running.harness import Knobs
from tests.running.small_models import spec_of
from tests.running.test_against_transformers import prompt
from windowpane.models import ModelSpec
from windowpane.models.drafters import drafter_for
from windowpane.parallel.launch import Workers

NEW_TOKENS, DRAFTS = 12, 3


def drafted(spec: ModelSpec, drafter: ModelSpec | None, directory: Path, workers: Workers) -> int:
    """How many drafts two ranks accept while they say what one says without a drafter."""
    both = spec.with_drafter(drafter_for(spec, drafter))
    source, own = write_checkpoint(both, directory / "target"), None
    if drafter is not None:
        own = source if drafter is spec else write_checkpoint(drafter, directory / "drafter")
    prompts, knobs = [prompt(1, 37), prompt(2, 9)], Knobs(chunk_tokens=40, poison=False)
    expected = Model(spec, source).alone(prompts, NEW_TOKENS, knobs)
    drafting = Knobs(chunk_tokens=40, poison=False, drafts=DRAFTS)
    run = Model(both, source, own).on_ranks(workers, prompts, NEW_TOKENS, drafting)
    assert_same(run, expected)
    return run.accepted_drafts


def test_a_model_drafts_for_itself(workers: Workers, tmp_path: Path) -> None:
    spec = spec_of("gemma4 everything")
    assert drafted(spec, spec, tmp_path, workers) > NEW_TOKENS


def test_a_layer_for_multi_token_prediction(workers: Workers, tmp_path: Path) -> None:
    drafted(spec_of("qwen3.5"), None, tmp_path, workers)


@pytest.mark.parametrize("centroids", [False, True])
def test_an_assistant(centroids: bool, workers: Workers, tmp_path: Path) -> None:
    drafted(spec_of("gemma4 K = V"), assistant_of("gemma4 K = V", centroids=centroids), tmp_path, workers)
