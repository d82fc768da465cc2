"""A GGUF file of every family that is read gives the model that transformers has, as stored and expanded."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from tests.running.harness import Knobs, generate_with
from tests.weights.gguf_files import MODELS, write
from windowpane.lowering.strips import StripWeight
from windowpane.models import load
from windowpane.weights import load_weights

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
CPU = torch.device("cpu")
NEW_TOKENS = 12
WITH_STATES = ("qwen35", "qwen35moe", "qwen3next", "granite hybrid", "nemotron-h", "falcon-h1")


def prompts(count: int) -> list[list[int]]:
    return torch.randint(3, 160, (count, 77), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_float32_files_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", name, F32)
    spec = load(tmp_path / "m.gguf")
    assert spec.quantization is None
    weights = load_weights(tmp_path / "m.gguf", spec, dtype=torch.float32, device=CPU)
    (start,) = prompts(1)
    run = generate_with(spec, weights, [start], NEW_TOKENS, Knobs(chunk_tokens=50))
    with torch.no_grad():
        logits = model(torch.tensor([[*start, *run.outputs[0]]]), use_cache=False).logits[0]
    expected = logits[len(start) - 1 : -1]
    assert (torch.stack(run.logits[0]) - expected).abs().max() <= 1e-4
    assert run.outputs[0] == expected.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        *((name, "") for name in ("qwen3moe", "gpt-oss", "phi3 long rope", "lfm2moe", "mixtral", "smollm3")),
        ("mixtral", "ffn_gate_exps"),
        ("mixtral", "ffn_down_exps"),
    ],
)
def test_packed_files_stay_packed_and_close(name: str, plain: str, tmp_path: Path) -> None:
    """`plain`: what such a file has in float32 among quantized experts."""
    path = tmp_path / "m.gguf"
    write(path, name, Q8_0, plain)
    spec, found = load(path), []
    for one in (spec, spec.expanded()):
        weights = load_weights(path, one, dtype=torch.float32, device=CPU)
        assert any(isinstance(weight, StripWeight) for weight in weights.values()) == (one is spec)
        if one is spec:
            experts = [weights[name] for name in weights if ".experts." in name and name.endswith("weight")]
            assert {type(weight) for weight in experts} <= {StripWeight, *([torch.Tensor] if plain else [])}
        run = generate_with(one, weights, prompts(6), 1, Knobs())
        found.append(torch.stack([row[0] for row in run.logits]))
    errors = (found[0] - found[1]).norm(dim=1) / found[1].norm(dim=1)
    assert errors.median() < 0.06, "inputs of 8 bits"


@pytest.mark.parametrize("name", WITH_STATES)
def test_packed_files_with_states_compute_what_expanded_ones_do(name: str, tmp_path: Path) -> None:
    """F16 weights are multiplied by inputs as they are, so heads in another order would show."""
    path, found = tmp_path / "m.gguf", []
    write(path, name, gguf.GGMLQuantizationType.F16)
    spec = load(path)
    for one in (spec, spec.expanded()):
        weights = load_weights(path, one, dtype=torch.float32, device=CPU)
        assert any(isinstance(weight, StripWeight) for weight in weights.values()) == (one is spec)
        run = generate_with(one, weights, prompts(2), NEW_TOKENS, Knobs(chunk_tokens=50))
        found.append(torch.stack([logits for row in run.logits for logits in row]))
    assert (found[0] - found[1]).abs().max() <= 1e-4
