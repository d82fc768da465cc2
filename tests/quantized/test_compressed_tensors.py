"""Checkpoints made by the `compressed-tensors` library: what is loaded is what it means, and logits agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.quantized.compressed import config_of, decompressed, save_quantized
from tests.running.harness import Knobs, generate_with
from tests.running.test_against_transformers import prompt
from windowpane.engine.accounts import accounts
from windowpane.engine.start import start
from windowpane.lowering.packed import JoinedWeight, PackedWeight, product, stack
from windowpane.models import load
from windowpane.models.weights import held_bytes, text_tensors, weight_bytes
from windowpane.schedule.request import Request, SamplingParams
from windowpane.weights import load_weights
from windowpane.weights import quantized as loading

CPU = torch.device("cpu")
INT4 = {"num_bits": 4, "type": "int"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
PACKED, FLOAT = "pack-quantized", "float-quantized"

CASES: dict[str, tuple[str, str, list[str], dict[str, Any]]] = {
    "int4, groups of 32": ("gemma4 K = V", PACKED, ["lm_head"], {**INT4, "strategy": "group", "group_size": 32}),
    "int4, groups of 64 with zero points": (
        "llama with biases",
        PACKED,
        ["lm_head"],
        {**INT4, "strategy": "group", "group_size": 64, "symmetric": False},
    ),
    "int4, groups of 128": ("qwen3", PACKED, [], {**INT4, "strategy": "group", "group_size": 128}),
    "int4 per channel with zero points": (
        "gemma3",
        PACKED,
        ["lm_head"],
        {**INT4, "strategy": "channel", "symmetric": False},
    ),
    "int4, some projections left as they are": (
        "llama",
        PACKED,
        ["lm_head", "re:.*k_proj", "model.layers.1", "re:.*2.mlp.down_proj$"],
        {**INT4, "strategy": "group", "group_size": 32},
    ),
    "fp8 per tensor": ("gemma4 everything", FLOAT, ["lm_head"], {**FP8, "strategy": "tensor"}),
    "fp8 per channel": ("mistral", FLOAT, ["lm_head"], {**FP8, "strategy": "channel"}),
    "fp8 by blocks": ("llama", FLOAT, ["lm_head"], {**FP8, "strategy": "block", "block_structure": [32, 64]}),
}
PROMPT_TOKENS, NEW_TOKENS = 40, 8


@pytest.fixture(params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    name, form, ignore, weights = CASES[request.param]
    config = config_of(name)
    if name == "gemma4 everything":
        config |= {"num_hidden_layers": 6, "layer_types": config["layer_types"][:6], "num_kv_shared_layers": 2}
    if name == "gemma4 K = V":
        config |= {"num_hidden_layers": 6}
    save_quantized(tmp_path, config, form, ignore, **weights)
    return name, tmp_path


def test_weights_and_logits_are_those_of_the_library(checkpoint: tuple[str, Path]) -> None:
    _, path = checkpoint
    spec = load(path)
    weights = load_weights(path, spec, dtype=torch.float32, device=CPU)
    config = spec.text.fields
    model = decompressed(path, {k: v for k, v in config.items() if k != "quantization_config"})
    plain = model.state_dict()
    packed = {key: weight for key, weight in weights.items() if isinstance(weight, PackedWeight)}
    assert packed
    for key, weight in packed.items():
        assert torch.equal(weight.dequantize(torch.float32), plain[key]), key

    start = prompt(seed=3, tokens=PROMPT_TOKENS)
    run = generate_with(spec, weights, [start], NEW_TOKENS, Knobs(chunk_tokens=17))
    with torch.no_grad():
        expected = model(torch.tensor([[*start, *run.outputs[0]]]), use_cache=False).logits[0, PROMPT_TOKENS - 1 : -1]
    assert (torch.stack(run.logits[0]) - expected).abs().max() <= 2e-4
    assert run.outputs[0] == expected.argmax(-1).tolist()


def test_memory_is_what_the_plan_says(checkpoint: tuple[str, Path]) -> None:
    _, path = checkpoint
    spec = load(path)
    weights = load_weights(path, spec, dtype=torch.float32, device=CPU)
    for tensor in text_tensors(spec):
        assert weights[tensor.name].nbytes == held_bytes(spec, tensor), tensor.name
    assert sum(weight.nbytes for weight in weights.values()) == weight_bytes(spec)


def test_the_engine_starts_with_what_the_plan_says(tmp_path: Path) -> None:
    config = config_of("gemma4 K = V") | {"num_hidden_layers": 6}
    save_quantized(tmp_path, config, PACKED, ["lm_head"], **INT4, strategy="group", group_size=32)
    started = start(tmp_path, {"device": "cpu", "max_model_len": 128, "kv_cache_memory_bytes": 2**24})
    books = {row.name: row for row in accounts(started.plan, started.reports)}
    assert books["weights"].predicted_bytes == books["weights"].measured_bytes
    request = Request("a", np.array(prompt(seed=3, tokens=20)), SamplingParams(max_tokens=4, temperature=0))
    started.engine.add(request)
    while started.engine.has_work:
        started.engine.step()
    assert len(request.output) == 4


def test_weights_are_never_unpacked_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_quantized(tmp_path, config_of("llama"), PACKED, ["lm_head"], **INT4, strategy="group", group_size=32)
    unpacked: list[int] = []
    pack = loading.pack_units

    def recording(values: torch.Tensor, kind: str) -> torch.Tensor:
        unpacked.append(values.numel())
        return pack(values, kind)

    monkeypatch.setattr(loading, "TILE_VALUES", 4096)
    monkeypatch.setattr(loading, "pack_units", recording)
    spec = load(tmp_path)
    in_tiles = load_weights(tmp_path, spec, dtype=torch.float32, device=CPU)
    assert max(unpacked) <= 4096
    monkeypatch.undo()
    at_once = load_weights(tmp_path, spec, dtype=torch.float32, device=CPU)
    for key, weight in in_tiles.items():
        if isinstance(weight, PackedWeight):
            assert torch.equal(weight.units, at_once[key].units)


def test_projections_that_are_not_held_alike_are_joined() -> None:
    """Sliced, they multiply as one matrix would."""
    plain = torch.randn(8, 64)
    units = torch.randint(-(2**15), 2**15, (24, 32), dtype=torch.int16)
    packed = PackedWeight("int4", 64, 32, 1, units, torch.rand(24, 2))
    joined = stack([packed, plain])
    assert isinstance(joined, JoinedWeight)
    assert joined.shape == (32, 64)
    whole = torch.cat([packed.dequantize(torch.float32), plain])
    x, bias = torch.randn(3, 64), torch.randn(32)
    for part in (slice(None), slice(0, 20), slice(20, 30), slice(26, 32)):
        found = product(x, joined[part], bias[part])
        torch.testing.assert_close(found, torch.nn.functional.linear(x, whole[part], bias[part]), rtol=1e-4, atol=1e-4)
