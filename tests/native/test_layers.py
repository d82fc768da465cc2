"""A decoding layer in one call gives, to the bit, what its parts give when they are called one by one."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.running.harness import Knobs, generate
from windowpane.attention.scores import Scores
from windowpane.lowering.cpu.ops import CpuOps, _DecodingLayer
from windowpane.lowering.reference import decoder
from windowpane.native import build

PROMPTS = [list(range(3, 60)), list(range(40, 97)), list(range(70, 127))]  # equally long, so that all decode together


@pytest.mark.parametrize(
    ("name", "capped"),
    [("llama with biases", False), ("qwen3", False), ("gemma3", False), ("gemma3", True), ("gemma4", False)],
)
def test_a_layer_in_one_call(name, capped, monkeypatch):
    if build.library() is None:
        pytest.skip(f"no kernels here: {build.why_not()}")
    if capped:
        monkeypatch.setattr(decoder, "Scores", partial(Scores, softcap=2.0, sinks=torch.linspace(-3, 3, 64)))
    calls = []
    run_layer = _DecodingLayer.__call__
    monkeypatch.setattr(_DecodingLayer, "__call__", lambda *args: (calls.append(1), run_layer(*args))[1])
    at_once = generate(name, PROMPTS, 20, Knobs())
    assert calls, "no layer was run in one call"
    monkeypatch.setattr(CpuOps, "decoding_layer", lambda *_: None)
    by_parts = generate(name, PROMPTS, 20, Knobs())
    assert at_once.outputs == by_parts.outputs
    for ours, theirs in zip(at_once.logits, by_parts.logits, strict=True):
        assert torch.equal(torch.stack(ours), torch.stack(theirs))
