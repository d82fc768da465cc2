"""A decoding layer in one call gives, to the bit, what its blocks give when they are called one by one."""

from __future__ import annotations

import pytest
import torch

from tests.native.compiled import compiled_library
from tests.running.harness import Knobs, generate
from windowpane.lowering.cpu import model
from windowpane.lowering.cpu.layers import JoinedLayers
from windowpane.lowering.cpu.pages import FORMATS

PROMPTS = [list(range(3, 60)), list(range(40, 97)), list(range(70, 127))]  # equally long, so that all decode together
JOINED = ("llama with biases", "qwen3", "gemma3", "gemma4", "gemma2", "exaone4", "granite", "smollm3")


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [*((name, "auto") for name in JOINED), *(("gemma3", dtype) for dtype in FORMATS), ("qwen3", "int8_per_token_head")],
)
def test_a_layer_in_one_call(name, kv_cache_dtype, monkeypatch):
    compiled_library()
    calls = []
    decode = JoinedLayers._decode
    monkeypatch.setattr(JoinedLayers, "_decode", lambda *args: (calls.append(1), decode(*args))[1])
    knobs = Knobs(kv_cache_dtype=kv_cache_dtype)
    at_once = generate(name, PROMPTS, 20, knobs)
    assert calls, "no layer was run in one call"
    monkeypatch.setattr(model, "join_layers", lambda *_: None)
    by_blocks = generate(name, PROMPTS, 20, knobs)
    assert at_once.outputs == by_blocks.outputs
    for ours, theirs in zip(at_once.logits, by_blocks.logits, strict=True):
        assert torch.equal(torch.stack(ours), torch.stack(theirs))


@pytest.mark.parametrize("name", ["olmo3", "cohere2", "gemma4 shared KV"])
def test_layers_that_one_call_cannot_compute_go_block_by_block(name, monkeypatch):
    """Norms across heads, branches side by side, K and V that others read."""
    decoded = []
    decode = JoinedLayers._decode
    monkeypatch.setattr(JoinedLayers, "_decode", lambda self, *args: (decoded.append(self), decode(self, *args))[1])
    run = generate(name, [PROMPTS[0]], 3, Knobs())
    shared = run.runner.model.decoder.shared_layers
    assert {layer.blocks[0].mixer.described.layer for joined in decoded for layer in joined.layers} == (
        {0, 1} if shared else set()
    )
