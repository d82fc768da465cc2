"""Every rope field of every family that runs, read as transformers reads it or refused.

Each family's config class and rotary embedding of transformers are built from the same config: frequencies and factors
of attention are compared for every layer type.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, logging

from tests.models.small_configs import FULL, SLIDING, small
from windowpane.kv.retention import Full
from windowpane.lowering.rope import frequencies
from windowpane.models import ModelError, from_config
from windowpane.models.rope import LONG, Rope
from windowpane.models.running import runnable

ONE_ROTATION = (
    "llama", "smollm3", "granite", "mistral", "ministral", "qwen2", "qwen3", "gemma2", "cohere2", "exaone4", "phi3",
    "qwen3 moe", "mixtral", "minimax m2", "glm4 moe", "gpt-oss", "llama4 text",
)  # fmt: skip
IN_FULL = ("llama", "phi3", "gemma3 text", "olmo3", "gemma4 text")
BY_TYPE = ("gemma3 text", "olmo3", "gemma4 text")
PARTLY = ("phi3", "glm4_moe", "minimax_m2")  # these rotate a part of each head, if so told
PAIRS = 8  # of the small configs' heads of 16 dims

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(PAIRS)],
    "long_factor": [1.0 + 0.5 * i for i in range(PAIRS)],
}
SECTIONS: dict[str, dict[str, Any]] = {
    "empty": {},
    "theta": {"rope_theta": 5e4},
    "null theta": {"rope_type": "default", "rope_theta": None},
    "default": {"rope_type": "default", "factor": 9.0, "attention_factor": 3.0},
    "null type": {"rope_type": None},
    "half of each head": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0, "attention_factor": 3.0},
    "linear by its older name": {"type": "linear", "factor": 4},
    "linear without a factor": {"rope_type": "linear"},
    "linear, half of each head": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
    "two types": {"rope_type": "linear", "type": "yarn", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64, "attention_factor": 3.0},
    "llama3 without an original length": LLAMA3,
    "llama3 without a low factor": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"},
    "llama3 with factors in the wrong order": {**LLAMA3, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn with a theta": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6},
    "yarn without a factor": {"rope_type": "yarn", "original_max_position_embeddings": 64},
    "yarn with a null factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    "yarn with an attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    "yarn with weights": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn with one weight": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7},
    "yarn with bounds": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 2.0, "truncate": False},
    "yarn with bounds of 0": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0, "beta_slow": None},
    "yarn with truncate null": {"rope_type": "yarn", "factor": 4.0, "truncate": None},
    "longrope": {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 64},
    "longrope with a factor": {"rope_type": "longrope", **FACTORS, "factor": 8.0},
    "longrope with an attention factor": {"rope_type": "longrope", **FACTORS, "attention_factor": 1.25},
    "longrope without long factors": {"rope_type": "longrope", "short_factor": FACTORS["short_factor"]},
    "longrope with too few factors": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3},
    "su": {"type": "su", **FACTORS, "original_max_position_embeddings": 64},
    "longrope, half of each head": {
        "rope_type": "longrope",
        **{key: factors[: PAIRS // 2] for key, factors in FACTORS.items()},
        "partial_rotary_factor": 0.5,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "proportional with a factor": {"rope_type": "proportional", "rope_theta": 1e6, "factor": 2.0},
    "unknown": {"rope_type": "mrope"},
}
BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"rope_theta": 5e5},
    {"rope_theta": None},
    {"rope_local_base_freq": 2e4, "partial_rotary_factor": 0.5},
    {"original_max_position_embeddings": 128},
    {"no_rope_layers": [1, 0, 0, 0], "no_rope_layer_interval": 2},
)
THEIR_ERRORS = (AttributeError, KeyError, RuntimeError, StrictDataclassError, TypeError, ValueError)
ROPE_FIELDS = {key for beside in BESIDE for key in beside} | {"rope_scaling", "rope_parameters"}
# What is refused although transformers runs it: it drops a part of what the config says, or is not implemented here.
REFUSALS = re.compile(
    r"replaces rope_parameters, and so|given by layer type|'(dynamic|mrope)' cannot be run yet|"
    r"(high_freq_factor|rope_theta) is .*, but must be (above|at least)|rope_scaling is no field of Gemma 4|"
    r"no rope_parameters\.\w+\.rope_theta"  # of Gemma 4, with one beside the layer types
)


def placements(section: dict[str, Any]) -> list[dict[str, Any]]:
    """The places in which configs have a section, alone and beside another."""
    theta = {"rope_type": "default", "rope_theta": 3e4}
    return [
        {"rope_scaling": section},
        {"rope_parameters": section},
        {"rope_scaling": section, "rope_parameters": theta},
        {"rope_parameters": {FULL: section}},
        {"rope_parameters": {FULL: section, SLIDING: theta}},
        {"rope_parameters": {FULL: theta, SLIDING: section, "truncate": False}},
        {"rope_parameters": {FULL: theta, SLIDING: theta}, "rope_scaling": section},
    ]


def configs(family: str) -> list[dict[str, Any]]:
    base = small({"gemma4 text": "gemma4 with shared KV", "llama4 text": "llama4"}.get(family, family))
    if "text_config" in base:
        base = {**base["text_config"], "architectures": [f"{family.removesuffix(' text').title()}ForCausalLM"]}
    found = [{**base, **beside} for beside in BESIDE]
    for section in SECTIONS.values():
        for place, rotation in enumerate(placements(section)):
            # Where the family has no layer types, or knows nothing else, one refusal says it all. Classes that read
            # alike are tried with fewer neighbours.
            usual = (place < 2) == (family in ONE_ROTATION)
            others = BESIDE if usual and family in IN_FULL else BESIDE[:2] if usual else BESIDE[:1]
            found += [{**base, **beside, **rotation} for beside in others]
    return found


def copied(config: dict[str, Any]) -> dict[str, Any]:
    """As it comes from a file: transformers changes what it is given."""
    fields: dict[str, Any] = json.loads(json.dumps(config))
    return fields


def theirs(config: dict[str, Any], long: bool) -> dict[str, tuple[torch.Tensor, float]]:
    """Frequencies and factor of attention by layer type, as transformers has them; whatever it raises."""
    fields = copied(config)
    theirs = AutoConfig.for_model(fields.pop("model_type"), **fields)
    modelling = import_module(type(theirs).__module__.replace("configuration", "modeling"))
    (rotary,) = (
        made
        for name, made in inspect.getmembers(modelling, inspect.isclass)
        if name.endswith("RotaryEmbedding") and "Vision" not in name
    )
    embedding = rotary(theirs)
    found = {}
    for kind in (FULL, SLIDING):
        typed = {"layer_type": kind} if "layer_type" in inspect.signature(rotary.forward).parameters else {}
        at = torch.tensor([[10_000 if long else 0]])
        made = embedding(torch.zeros(1), at, **typed)
        # Llama 4 has one complex number for a pair, gpt-oss one cosine.
        width = made.shape[-1] * 2 if isinstance(made, torch.Tensor) else made[0].shape[-1]
        width *= 2 if config["model_type"] == "gpt_oss" else 1
        prefix = f"{kind}_" if typed else ""
        inverse = getattr(embedding, f"{prefix}inv_freq")
        head_dim = getattr(theirs.per_layer_config[kind] if typed else theirs, "head_dim", 16)
        if config["model_type"] not in PARTLY and width != head_dim:
            raise ValueError("this model's own code cannot apply it: queries and angles differ in width")
        padded = torch.nn.functional.pad(inverse, (0, head_dim // 2 - len(inverse)))
        found[kind] = padded, float(getattr(embedding, f"{prefix}attention_scaling"))
    return found


def ours(config: dict[str, Any]) -> dict[str, Rope]:
    """By layer type; types whose layers do not rotate have none."""
    decoder = runnable(from_config(config, "small"))
    return {
        FULL if isinstance(attention.cache.retention, Full) else SLIDING: attention.rope
        for attention in decoder.attentions
        if attention.rope is not None
    }


def difference(config: dict[str, Any]) -> str | None:
    """What is otherwise than in transformers, or None."""
    try:
        read = ours(copied(config))
    except ModelError as error:
        refusal = str(error)
        if "\n" in refusal:
            return f"refused in several lines: {refusal}"
        if REFUSALS.search(refusal):
            return None
        try:
            theirs(config, long=False)
        except THEIR_ERRORS:
            return None
        return f"refused, and transformers runs it: {refusal}"
    for long in (False, True) if any(rope.kind == LONG for rope in read.values()) else (False,):
        expected = theirs(config, long)
        for kind, rope in read.items():
            found = frequencies(rope, 10_001 if long and rope.kind == LONG else 1)
            inverse, factor = expected[kind]
            if not torch.allclose(found, inverse, rtol=1e-6, atol=0):
                return f"{kind}: frequencies {found.tolist()} instead of {inverse.tolist()}"
            if abs(rope.attention_factor - factor) > 1e-6:
                return f"{kind}: attention factor {rope.attention_factor} instead of {factor}"
    return None


@pytest.mark.parametrize("family", (*ONE_ROTATION, *BY_TYPE))
def test_every_rope_field_is_read_as_transformers_reads_it_or_refused(family: str) -> None:
    logging.set_verbosity_error()
    wrong = []
    for config in configs(family):
        fields = {key: config[key] for key in ROPE_FIELDS if key in config}
        try:
            found = difference(config)
        except THEIR_ERRORS as error:
            found = f"read, and transformers fails: {error!r}"
        if found:
            wrong.append(f"{fields}: {found}")
    assert not wrong, f"{len(wrong)}: " + "\n".join(wrong[:10])


STRAY = ({"no_rope_layers": [0, 1, 0, 1]}, {"no_rope_layer_interval": 2})
KINDS = [FULL, SLIDING, SLIDING, FULL]
WHICH_LAYERS: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(("llama", "granite", "mistral", "qwen2", "qwen3", "gemma2", "phi3"), STRAY),
    "ministral": (*STRAY, {"layer_types": KINDS}),
    "smollm3": ({}, *STRAY, {"no_rope_layers": [0, 0, 0, 0]}, {"no_rope_layers": None, "no_rope_layer_interval": 3}),
    "cohere2": ({}, *STRAY, {"layer_types": KINDS}, {"sliding_window_pattern": 2}),
    "exaone4": ({}, *STRAY, {"layer_types": KINDS}, {"sliding_window": None, "layer_types": [FULL] * 4}),
}


@pytest.mark.parametrize("family", WHICH_LAYERS)
def test_the_layers_that_rotate_are_those_of_transformers(family: str) -> None:
    """A layer of theirs rotates if its attention gives something else for other angles."""
    logging.set_verbosity_error()
    for change in WHICH_LAYERS[family]:
        config = {**small(family), **change}
        fields = copied(config)
        described = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = AutoModelForCausalLM.from_config(described, dtype=torch.float32, attn_implementation="eager")
        torch.manual_seed(3)
        hidden, still, turned = torch.randn(1, 5, 64), torch.zeros(1, 5, 16), torch.randn(1, 5, 16)
        rotates = []
        for layer in model.model.layers:
            attended = [
                layer.self_attn(hidden, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)[0]
                for angles in (still, turned)
            ]
            rotates.append(not torch.allclose(*attended))
        decoder = runnable(from_config(config, "small"))
        assert [attention.rope is not None for attention in decoder.attentions] == rotates, change


def test_a_list_of_layers_without_rotation_that_does_not_fit_is_refused() -> None:
    for wrong in ([], [1, 0], [1, 1, 1, 0, 1]):
        with pytest.raises(ModelError, match=rf"no_rope_layers has {len(wrong)} entries for 4 layers"):
            from_config({**small("smollm3"), "no_rope_layers": wrong}, "small")


def test_scaling_that_would_replace_a_theta_says_where_to_put_it() -> None:
    """What model cards tell people to add for YaRN, in a config that has its theta in the newer place."""
    config = {
        **small("qwen3"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    }
    with pytest.raises(ModelError, match=r"rope_theta 1000000.0: put it into rope_scaling"):
        from_config(config, "small")
    config["rope_scaling"]["rope_theta"] = 1e6
    assert ours(config)[FULL].theta == 1e6
