"""Checks of coded KV in kernels, for a process with TRITON_INTERPRET=1; named on the command line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import torch

from bench.gpu_checks.attention_cases import Layer, error, make_pages, run_decode, run_prefill
from tests.kernels.interpreted_attention import FLOAT, require
from windowpane.kv.formats import FORMATS

CODED = [name for name, fmt in FORMATS.items() if fmt.family != "float"]
# The interpreter takes long over fp8. What such codes mean is one function, which two layers show as well as five.
OF_FP8 = ("pair, window, 3 stripes", "latent, soft-capped, sinks")
LAYERS = {
    "pair, window, 3 stripes": Layer(1, 2, 32, window_tokens=41, block_tokens=8, stripes=3),
    "latent, 1/4 of the head rotates, window": Layer(1, 16, 64, rotary=16, window_tokens=40),
    "latent, 1/2 of the head rotates": Layer(1, 2, 64, rotary=32),
    "pair, soft-capped, sinks": Layer(2, 3, 64, softcap=0.7, has_sinks=True),
    "latent, soft-capped, sinks": Layer(2, 4, 128, rotary=16, softcap=0.7, has_sinks=True),
}


def cases() -> Iterator[tuple[str, str, Layer]]:
    for name in CODED:
        for title, layer in LAYERS.items():
            if title in OF_FP8 or not name.startswith("fp8"):
                yield name, title, replace(layer, kv_format=name)


def decode() -> None:
    """By as many programs as there may be, and by one."""
    for (name, title, layer), programs in zip(cases(), cycle((None, 1, None))):
        window = layer.window_tokens or 64
        lengths = [0, 1, 2 * layer.block_tokens, window, 2 * window + 1]
        paged = make_pages(layer, lengths, "cpu", FLOAT, room_tokens=1)
        got, exact, _ = run_decode(paged, padding=2, programs=programs)
        require(error(got, exact), f"decode, {name}, {title}, {programs} programs")


def prefill() -> None:
    """Chunks over a past that is decoded for them, all at once and one at a time."""
    for (name, title, layer), together in zip(cases(), cycle((True, False, True))):
        window = layer.window_tokens or 40
        lengths = [0, window - 1, 2 * window + 3]
        paged = make_pages(layer, lengths, "cpu", FLOAT, room_tokens=80)
        got, exact, _ = run_prefill(paged, [(18, 18), (1, 1), (19, 4)], together=together)
        require(error(got, exact), f"prefill, {name}, {title}, together: {together}")


if __name__ == "__main__":
    warnings.filterwarnings("error")
    # the interpreter's own use of NumPy
    warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
