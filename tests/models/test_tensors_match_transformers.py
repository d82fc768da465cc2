"""Tensor names, shapes and layer kinds are those of transformers, built from the same config on the meta device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from tests.models.small_configs import CHUNKED, FULL, LINEAR, SLIDING, SMALL, small
from windowpane.models import load

# transformers would save the experts of Qwen3.5 one by one, but the published bfloat16 checkpoints hold them fused.
PUBLISHED_AS_BUILT = {"qwen3.5 moe"}
# Of these only the text part is read.
TEXT_ONLY = {"qwen3 vl", "qwen3 vl moe", "qwen2.5 vl", "mistral3", "kimi k2.5", "step3.7"}
TOWER = re.compile(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|mm_projector|vit_\w+)\.")
# transformers spells it otherwise than published configs do.
CLASS_NAMES = {"KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration"}
# Their config classes have no layer_types, because all layers are alike.
UNIFORM = {
    "qwen3 vl",
    "qwen3 vl moe",
    "mistral3",
    "ministral3",
    "mixtral",
    "minimax m2",
    "glm4 moe",
    "seed oss",
    "hunyuan",
    "hunyuan moe",
    "ernie",
    "ernie moe",
    "kimi k2.5",
    "glm4 moe lite",
    "granite",
    "llama",
    "llama with biases",
    "mistral",
    "qwen3 moe",
    "phi3",
    "deepseek v3",
    "deepseek v3.2",
    "glm moe dsa",
    "whisper",
}
# Theirs name no retention, or two in one layer; test_reading_configs has these.
OTHER_WORDS = {
    "zamba2",
    "falcon h1",
    "falcon h1 with norms",
    "recurrent gemma",
    "lfm2",
    "lfm2 moe",
    "minimax m3",
    "step3.7",
}


@pytest.mark.parametrize("name", SMALL)
def test_tensors_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    config = SMALL[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = dict(entry for tensor in load(tmp_path).tensors for entry in tensor.checkpoint_entries())
    theirs = checkpoint_tensors(config, as_built=name in PUBLISHED_AS_BUILT)
    if name in TEXT_ONLY:
        theirs = {tensor: shape for tensor, shape in theirs.items() if not TOWER.match(tensor)}
    assert ours == theirs


def checkpoint_tensors(config: dict[str, Any], as_built: bool) -> dict[str, tuple[int, ...]]:
    fields = json.loads(json.dumps(config))
    model_config = transformers.CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    with torch.device("meta"):
        architecture = fields["architectures"][0]
        model = getattr(transformers, CLASS_NAMES.get(architecture, architecture))(model_config)
    own = _once(model.state_dict(keep_vars=True))
    tensors = own if as_built else revert_weight_conversion(model, own)
    names = dict(zip(tensors, tensors, strict=True))
    if fields["model_type"] == "gemma3":
        # Its checkpoints predate the flattening of SigLIP's inner module.
        names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in tensors}
    if fields["model_type"] == "kimi_k25":
        # The tower's blocks are called layers inside transformers; going back, the text model's layers become blocks.
        names = {name: name.replace("language_model.model.blocks.", "language_model.model.layers.") for name in tensors}
    if fields["model_type"] == "kimi_linear":
        # transformers writes the dense layers under the experts' name; Kimi's own code and checkpoints do not.
        dense = ("block_sparse_moe.gate_proj", "block_sparse_moe.up_proj", "block_sparse_moe.down_proj")
        names = {n: n.replace("block_sparse_moe", "mlp") if any(d in n for d in dense) else n for n in tensors}
    shapes = {names[name]: tuple(tensor.shape) for name, tensor in tensors.items()}
    if fields["model_type"] == "qwen3_vl_moe":
        # transformers turns the published experts around when it loads them, and does not turn them back.
        shapes = {n: (s[0], s[2], s[1]) if ".experts." in n else s for n, s in shapes.items()}
    return shapes


def _once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied tensors under the first of their names, as safetensors stores them."""
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}


@pytest.mark.parametrize("name", [name for name in SMALL if name not in UNIFORM | OTHER_WORDS])
def test_layer_kinds_without_layer_types_follow_the_same_rule(name: str, tmp_path: Path) -> None:
    config = small(name, layer_types=None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load(tmp_path)
    theirs = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config).get_text_config()
    kinds = {"full": FULL, "window": SLIDING, "chunk": CHUNKED, "state": LINEAR}
    ours = {cache.layer: kinds[cache.retention.kind] for cache in spec.caches}
    assert ours == {layer: kind for layer, kind in enumerate(theirs.layer_types) if layer in ours}
