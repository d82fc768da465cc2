"""Attention kernels with a soft-cap and with sinks, compiled from what the engine would launch. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.test_formats_compile import CPU, ROWS, ints, layer_of, numbers, record, view_of
from tests.kernels.test_hopper_compiles import LAYERS
from windowpane.attention.scores import Scores
from windowpane.attention.triton import decode as decoding
from windowpane.attention.triton import prefill as prefilling

QUERY_HEADS = 32  # of `layer_of`
VIEWS = {
    "window": LAYERS["31B window"][0],
    "latent": LAYERS["31B full, latent"][0],
    "int8 window": view_of("int8_per_token_head"),
    "int4 latent": view_of("int4_per_token_head", latent=True),
}
CAPPED = Scores(0.1, softcap=50.0)


def compiled_decode(view, scores, capability, monkeypatch):
    """Decoding, and its combination of parts."""
    kernels = [record(monkeypatch, decoding, name, capability) for name in ("_decode_kernel", "combine_kernel")]
    q, k = numbers(ROWS, QUERY_HEADS, view.dim), numbers(ROWS, view.kv_heads, view.dim)
    scratch = decoding.DecodeScratch(ROWS, view.kv_heads, QUERY_HEADS // view.kv_heads, view.dim, 256, CPU)
    lists = (ints(ROWS), ints(ROWS), ints(ROWS + 1))
    decoding.decode(q, k, k, layer_of(view, scores), *lists, scratch, torch.zeros_like(q), pdl=capability == 90)
    monkeypatch.undo()
    return [kernel.compiled for kernel in kernels]


def compiled_prefill(view, scores, capability, monkeypatch):
    kernel = record(monkeypatch, prefilling, "_latent_kernel" if view.latent else "_pair_kernel", capability)
    q, k = numbers(ROWS, QUERY_HEADS, view.dim), numbers(ROWS, view.kv_heads, view.dim)
    prefilling.prefill(q, k, k, layer_of(view, scores), ints(1, 6), ints(1, 2), torch.zeros_like(q))
    monkeypatch.undo()
    return [kernel.compiled]


@pytest.mark.parametrize(
    ("compiled", "name", "capability"),
    [
        (compiled_decode, "window", 90),
        (compiled_decode, "int4 latent", 90),
        (compiled_decode, "int8 window", 86),
        (compiled_prefill, "latent", 90),
        (compiled_prefill, "window", 86),
    ],
)
def test_caps_and_sinks_take_no_shared_memory_and_plain_kernels_have_neither(compiled, name, capability, monkeypatch):
    plain, capped, sunk = (
        compiled(VIEWS[name], scores, capability, monkeypatch)
        for scores in (Scores(0.1), CAPPED, replace(CAPPED, sinks=torch.zeros(QUERY_HEADS)))
    )
    for without, with_cap, with_sinks in zip(plain, capped, sunk, strict=True):
        powers = [kernel.asm["ptx"].count("ex2.approx") for kernel in (without, with_cap, with_sinks)]
        assert powers == sorted(set(powers)), "each takes exponentials of its own"
        assert with_sinks.metadata.shared <= without.metadata.shared
