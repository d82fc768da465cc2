"""Shipped configs run as their checkpoints do, not by a family's defaults: dummy weights measure the real work."""

from __future__ import annotations

import pytest

from windowpane.kv.retention import Full
from windowpane.lowering.recipe import Recipe, read_recipe
from windowpane.lowering.rope import Rope
from windowpane.models import load, shipped_names
from windowpane.models.config import ModelError

ROPES = ("rope_theta", "rope_parameters")
ACTIVATIONS = ("hidden_act", "hidden_activation")


def runnable() -> list[str]:
    names = []
    for name in shipped_names():
        try:
            read_recipe(load(name))
        except ModelError:
            continue
        names.append(name)
    return names


@pytest.mark.parametrize("name", runnable())
def test_a_config_says_what_its_family_would_otherwise_guess(name: str) -> None:
    text = load(name).text
    assert text.has("rms_norm_eps")
    assert any(map(text.has, ROPES))
    assert any(map(text.has, ACTIVATIONS))


def ropes(recipe: Recipe, name: str) -> tuple[Rope, set[Rope]]:
    """Those of full layers, which are all alike, and of the others."""
    full = {c.layer for c in load(name).token_caches if isinstance(c.retention, Full)}
    of_full = {layer.rope for layer in recipe.layers if layer.kv_layer in full}
    assert len(of_full) == 1
    return of_full.pop(), {layer.rope for layer in recipe.layers if layer.kv_layer not in full}


def test_gemma_3_stretches_its_full_layers_and_scales_its_largest_model_apart() -> None:
    recipe = read_recipe(load("gemma-3-27b"))
    full, sliding = ropes(recipe, "gemma-3-27b")
    assert (full.kind, full.theta, full.factor) == ("linear", 1e6, 8.0)
    assert sliding == {Rope("default", 128, theta=1e4)}
    assert {layer.scale for layer in recipe.layers} == {168**-0.5}
    assert read_recipe(load("gemma-3-1b")).layers[0].scale == 256**-0.5


def test_gemma_4_turns_a_quarter_of_its_full_heads_and_caps_its_logits() -> None:
    recipe = read_recipe(load("gemma-4-31b"))
    full, sliding = ropes(recipe, "gemma-4-31b")
    assert (full.kind, full.partial, full.theta, full.head_dim) == ("proportional", 0.25, 1e6, 512)
    assert sliding == {Rope("default", 256, theta=1e4)}
    assert recipe.final_softcap == 30.0


@pytest.mark.parametrize(
    ("name", "theta", "eps"),
    [
        ("llama-3.1-8b", 5e5, 1e-5),
        ("mistral-7b-v0.1", 1e4, 1e-5),
        ("ministral-8b", 1e8, 1e-5),
        ("qwen3-8b", 1e6, 1e-6),
        ("smollm2-135m", 1e5, 1e-5),
        ("smollm3-3b", 5e6, 1e-6),
    ],
)
def test_others_have_their_own_base_and_epsilon(name: str, theta: float, eps: float) -> None:
    recipe = read_recipe(load(name))
    assert {layer.rope.theta for layer in recipe.layers if layer.rope.kind} == {theta}
    assert recipe.norm_eps == eps


def test_llama_3_1_stretches_slow_turns() -> None:
    rope = read_recipe(load("llama-3.1-8b")).layers[0].rope
    assert (rope.kind, rope.factor, rope.original_positions) == ("llama3", 8.0, 8192)
