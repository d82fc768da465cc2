"""Gemma 4 configs as transformers saves them: what full layers have of their own stands in `per_layer_config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import windowpane.models
from tests.models.small_configs import FULL, SLIDING, small
from windowpane.models import ModelError, from_config, shipped_names

SHIPPED = [name for name in shipped_names() if name.startswith("gemma-4")]
SMALL = ["gemma4", "gemma4 with shared KV", "gemma4 with experts", "gemma4 unified"]


def published(name: str) -> dict[str, Any]:
    if name in SMALL:
        return small(name)
    path = Path(windowpane.models.__file__).parent / "shipped" / f"{name}.json"
    fields: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return fields


def saved(fields: dict[str, Any], tmp_path: Path, *, explicit: bool = False) -> dict[str, Any]:
    usual = "gemma4_unified" if "Unified" in fields["architectures"][0] else "gemma4"
    kind = transformers.CONFIG_MAPPING[fields.get("model_type", usual)]
    config = kind.from_dict(json.loads(json.dumps(fields)))
    config.get_text_config().serialize_explicit_per_layer_config = explicit
    config.save_pretrained(tmp_path)
    return {**json.loads((tmp_path / "config.json").read_text()), "architectures": fields["architectures"]}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", [*SHIPPED, *SMALL])
def test_a_saved_config_is_the_same_model(name: str, explicit: bool, tmp_path: Path) -> None:
    fields = published(name)
    again = saved(fields, tmp_path, explicit=explicit)
    text = again.get("text_config", again)
    assert "per_layer_config" in text and "global_head_dim" not in text and "num_global_key_value_heads" not in text
    before, after = from_config(fields, name), from_config(again, name)
    assert after.caches == before.caches
    assert after.tensors == before.tensors
    assert after.decoder == before.decoder


def test_sizes_of_the_older_form_do_not_count_beside_the_newer() -> None:
    text = small("gemma4 with experts", per_layer_config={"3": {"head_dim": 64}}, global_head_dim=128)
    assert [cache.key_dim for cache in from_config(text, "small").token_caches] == [16, 16, 16, 64]
    alike = small("gemma4 with experts", per_layer_config={})
    assert [cache.key_dim for cache in from_config(alike, "small").token_caches] == [16] * 4


def test_kv_heads_of_one_layer_count_without_a_shared_projection_too() -> None:
    text = small("gemma4 with experts", per_layer_config={"003": {"num_key_value_heads": 1}})
    assert [cache.kv_heads for cache in from_config(text, "small").token_caches] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"4": {"head_dim": 32}}, r"per_layer_config: '4' is no number of one of 4 layers"),
        ({"last": {"head_dim": 32}}, r"per_layer_config: 'last' is no number"),
        ({"3": {"sliding_window": 4}}, r"per_layer_config\.3\.sliding_window: layers can differ in head_dim and"),
        ({"1": {"head_dim": 32}}, rf"layer 1 differs from other {SLIDING} layers"),
        ({"3": {"num_key_value_heads": 3}}, r"per_layer_config\.3\.num_key_value_heads is 3, no divisor of 4"),
        ({"3": {"head_dim": "32"}}, r"per_layer_config\.3\.head_dim must be a whole number"),
        ({"3": 32}, r"per_layer_config\.3 must be an object"),
    ],
)
def test_what_layers_cannot_have_of_their_own_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_config(small("gemma4 with experts", per_layer_config=given), "small")


def test_full_layers_must_be_alike() -> None:
    config = small("gemma4 with shared KV", per_layer_config={"1": {"head_dim": 32}})
    with pytest.raises(ModelError, match=rf"layer 3 differs from other {FULL} layers, which must be alike"):
        from_config(config, "small")
