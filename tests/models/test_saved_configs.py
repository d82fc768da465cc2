"""Configs as transformers saves them again describe the same model: fields renamed, defaults written out, infinity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto import modeling_auto

import windowpane.models
from tests.models.published import PUBLISHED
from tests.models.small_configs import SMALL, small
from windowpane.models import from_config, load, shipped_names

SHIPPED = Path(windowpane.models.__file__).parent / "shipped"
MODEL_TYPES = {
    architecture: model_type
    for table in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    for model_type, architectures in table.items()
    for architecture in ([architectures] if isinstance(architectures, str) else architectures)
}
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"small {name}": small(name) for name in SMALL},
    **{name: published.config for name, published in PUBLISHED.items()},
    **{name: json.loads((SHIPPED / f"{name}.json").read_text("utf-8")) for name in shipped_names()},
}
OTHER_DEFAULTS = {
    "nemotron-h-8b",  # the class keeps states in float32, where vLLM goes by the model's dtype
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506",  # the class around the text model ties embeddings
    "mistralai/Ministral-3-8B-Instruct-2512",
}


def config_class(fields: dict[str, Any]) -> Any:
    """None where transformers does not know the model."""
    model_type = fields.get("model_type") or MODEL_TYPES.get(fields["architectures"][0])
    # `get` would not load the class.
    return transformers.CONFIG_MAPPING[model_type] if model_type in transformers.CONFIG_MAPPING else None  # noqa: SIM401


KNOWN = [name for name, fields in CONFIGS.items() if config_class(fields) is not None and name not in OTHER_DEFAULTS]


def test_most_models_are_known_to_transformers() -> None:
    assert len(KNOWN) > 0.85 * len(CONFIGS)


@pytest.mark.parametrize("name", KNOWN)
def test_a_saved_config_is_the_same_model(name: str, tmp_path: Path) -> None:
    fields = {key: value for key, value in CONFIGS[name].items() if key not in ("_windowpane", "quantization_config")}
    config_class(fields).from_dict(json.loads(json.dumps(fields))).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": fields["architectures"]}))
    before, after = from_config(fields, name), load(tmp_path)
    assert after.caches == before.caches
    assert after.tensors == before.tensors
    assert after.decoder == before.decoder
