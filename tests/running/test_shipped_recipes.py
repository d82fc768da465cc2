"""Shipped configs run as their checkpoints do, not by a family's defaults: dummy weights measure the real work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from windowpane.kv.retention import Full
from windowpane.models import from_config, load, shipped_names
from windowpane.models.blocks import LAYER, Attention, Block, Decoder, GatedMLP, Norm
from windowpane.models.config import ModelError
from windowpane.models.rope import Rope
from windowpane.models.running import FAMILIES, runnable
from windowpane.models.spec import ModelSpec

EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
ROPES = ("rope_theta", "rope_parameters")
ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
RUN = [name for name in shipped_names() if load(name).decoder is not None]


@pytest.mark.parametrize("name", RUN)
def test_a_config_says_what_its_family_would_otherwise_guess(name: str) -> None:
    spec = load(name)
    assert any(map(spec.text.has, EPSILONS))
    if any(a.rope is not None for a in described(name).attentions):
        assert any(map(spec.text.has, ROPES))
    if spec.family != "lfm2":  # whose configs name no activation
        assert any(map(spec.text.has, ACTIVATIONS))


@pytest.mark.parametrize("name", shipped_names())
def test_a_model_runs_where_its_blocks_are_described(name: str) -> None:
    spec = load(name)
    assert name not in RUN or spec.family in FAMILIES
    if name in RUN:
        runnable(spec)
    else:
        with pytest.raises(ModelError, match="run yet"):
            runnable(spec)


def described(name: str) -> Decoder:
    return runnable(load(name))


def ropes(name: str) -> tuple[Rope | None, set[Rope | None]]:
    """Those of full layers, which are all alike, and of the others."""
    attentions = described(name).attentions
    of_full = {a.rope for a in attentions if isinstance(a.cache.retention, Full)}
    assert len(of_full) == 1
    return of_full.pop(), {a.rope for a in attentions if not isinstance(a.cache.retention, Full)}


def test_gemma_3_stretches_its_full_layers_and_scales_its_largest_model_apart() -> None:
    full, sliding = ropes("gemma-3-27b")
    assert full is not None and (full.kind, full.theta, full.factor) == ("linear", 1e6, 8.0)
    assert sliding == {Rope("default", 128, theta=1e4)}
    assert {a.scale for a in described("gemma-3-27b").attentions} == {168**-0.5}
    assert described("gemma-3-1b").attentions[0].scale == 256**-0.5


def test_gemma_4_rotates_a_quarter_of_its_full_heads_and_caps_its_logits() -> None:
    full, sliding = ropes("gemma-4-31b")
    assert full is not None
    assert (full.kind, full.partial, full.theta, full.head_dim) == ("proportional", 0.25, 1e6, 512)
    assert sliding == {Rope("default", 256, theta=1e4)}
    assert described("gemma-4-31b").logit_softcap == 30.0


def test_gemma_2_caps_scores_and_logits() -> None:
    decoder = described("gemma-2-27b")
    assert {a.softcap for a in decoder.attentions} == {50.0} and decoder.logit_softcap == 30.0
    assert {a.scale for a in decoder.attentions} == {144**-0.5}


def test_olmo_3_stretches_its_full_layers_only() -> None:
    full, sliding = ropes("olmo-3-7b")
    assert full is not None and (full.kind, full.theta, full.factor) == ("yarn", 5e5, 8.0)
    assert full.attention_factor == pytest.approx(1.2079441541679836)
    assert sliding == {Rope("default", 128, theta=5e5)}


def test_hybrids_without_rotation_in_full_layers() -> None:
    for name, theta in (("exaone-4-32b", 1e6), ("command-r7b", 5e4)):
        full, sliding = ropes(name)
        assert full is None and {rope.theta for rope in sliding if rope} == {theta}


@pytest.mark.parametrize(
    ("name", "theta", "eps"),
    [
        ("llama-3.1-8b", 5e5, 1e-5),
        ("mistral-7b-v0.1", 1e4, 1e-5),
        ("mistral-small-24b", 1e8, 1e-5),
        ("ministral-8b", 1e8, 1e-5),
        ("phi-4", 2.5e5, 1e-5),
        ("qwen3-8b", 1e6, 1e-6),
        ("smollm2-135m", 1e5, 1e-5),
        ("smollm3-3b", 5e6, 1e-6),
    ],
)
def test_others_have_their_own_base_and_epsilon(name: str, theta: float, eps: float) -> None:
    decoder = described(name)
    assert {a.rope.theta for a in decoder.attentions if a.rope} == {theta}
    assert decoder.norm.eps == eps


def test_llama_3_1_stretches_slow_rotations() -> None:
    rope = described("llama-3.1-8b").attentions[0].rope
    assert rope is not None and (rope.kind, rope.factor, rope.original_positions) == ("llama3", 8.0, 8192)


def test_unknown_activations_and_rotations_are_planned_and_not_run() -> None:
    spec = load("llama-3.1-8b")
    decoder = described("llama-3.1-8b")
    block = decoder.layers[0].blocks[1]
    assert isinstance(block.mixer, GatedMLP)
    odd = replace(block, mixer=replace(block.mixer, activation="relu2"))
    layers = (replace(decoder.layers[0], blocks=(decoder.layers[0].blocks[0], odd)), *decoder.layers[1:])
    with pytest.raises(ModelError, match="hidden_act: 'relu2' cannot be run yet; known: silu"):
        runnable(replace(spec, decoder=replace(decoder, layers=layers)))


# Their recurrent layers have the activation of their MLPs.
ONE_FOR_ALL = ("falcon-h1-7b", "granite-4.0-h-small", "qwen3-next-80b-a3b")


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        (
            "nemotron-h-8b",
            {"mlp_hidden_act": "silu"},
            "mlp_hidden_act is 'silu', and MLPs without a gate run with relu2",
        ),
        (
            "nemotron-h-8b",
            {"mamba_hidden_act": "gelu"},
            "mamba_hidden_act is 'gelu', and recurrent layers run with silu",
        ),
        *(
            (name, {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh', and")
            for name in ONE_FOR_ALL
        ),
    ],
)
def test_activations_that_no_lowering_has_are_refused_before_anything_is_loaded(
    name: str, changes: dict[str, str], why: str
) -> None:
    shipped = load(name)
    spec = from_config({**shipped.text.fields, **changes}, name)
    assert spec.tensors == shipped.tensors
    with pytest.raises(ModelError, match=f"{name} can be planned but not run yet: {why}"):
        runnable(spec)


def with_first_layer(blocks: tuple[Block, ...]) -> ModelSpec:
    """Qwen3 8B with another first layer."""
    spec, decoder = load("qwen3-8b"), described("qwen3-8b")
    layers = (replace(decoder.layers[0], blocks=blocks), *decoder.layers[1:])
    return replace(spec, decoder=replace(decoder, layers=layers))


def test_what_not_every_lowering_has_is_refused() -> None:
    attends, feeds = described("qwen3-8b").layers[0].blocks
    assert isinstance(attends.mixer, Attention) and attends.mixer.q_norm is not None
    layer_normed = replace(attends.mixer.q_norm, kind=LAYER)
    latent = replace(attends.mixer, cache=replace(attends.mixer.cache, latent=True))
    assert latent.rope is not None
    hostile = {
        "layer 0 has its attention behind another block": (feeds, attends),
        "otherwise than by their RMS": (replace(attends, mixer=replace(attends.mixer, q_norm=layer_normed)), feeds),
        "layer 0 norms queries otherwise than keys": (
            replace(attends, mixer=replace(attends.mixer, q_norm=replace(attends.mixer.q_norm, eps=1.0))),
            feeds,
        ),
        "rotates pairs that are not half a head apart": (
            replace(attends, mixer=replace(latent, rope=latent.rope.with_interleaved_pairs())),
            feeds,
        ),
        "a norm between blocks has no weight": (replace(attends, before=Norm(1e-6)), feeds),
    }
    for message, blocks in hostile.items():
        with pytest.raises(ModelError, match=message):
            runnable(with_first_layer(blocks))


@pytest.mark.parametrize(
    "name", ["qwen3.5-27b", "qwen3-next-80b-a3b", "nemotron-h-8b", "granite-4.0-h-small", "falcon-h1-7b", "lfm2-1.2b"]
)
def test_a_gpu_runs_recurrent_states(name: str) -> None:
    spec = load(name)
    assert runnable(spec, on_gpu=True) is spec.decoder
