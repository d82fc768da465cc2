"""The Hopper prefill kernels on a GPU, at the sizes of real layers: checks against float64, and timings.

Judged as the plain kernels are (`attention.py`), through the engine's own dispatch: of each step some segments are
large enough for a Hopper kernel and some are not.

    python3 -m bench.gpu_checks.hopper [WORD …]     timings, beside those of the plain kernels
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu_checks.attention import (
    ARENA_BYTES,
    DEVICE,
    FULL_31B,
    LAYERS,
    QWEN3,
    WINDOW_31B,
    Bare,
    Check,
    judge,
    prefill_step,
    random_arena,
)
from bench.gpu_checks.attention_cases import Layer, make_pages, run_prefill
from bench.gpu_checks.engine import make_runner
from bench.timing import microseconds
from tests.running.small_models import WIDE_CONFIGS
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.kv.changes import NO_CHANGES
from windowpane.kv.hopper_scratch import CAPABILITY, Heads
from windowpane.runners.cuda import CudaRunner
from windowpane.schedule.batch import Batch, PromptChunk

CHECKED = {
    "31B window": WINDOW_31B,
    "31B full, latent": FULL_31B,
    "31B full, pair": Layer(4, 8, 512),
    "Qwen3": QWEN3,
    "E4B window": LAYERS["E4B window"],
    "E4B full, pair": LAYERS["E4B full, pair"],
    "latent, 32-token blocks, 2 stripes": Layer(2, 16, 512, rotary=64, block_tokens=32, stripes=2),
    "latent, 64-token blocks": Layer(4, 8, 512, rotary=64, block_tokens=64),
    "512 dims, one query head, 64-token blocks": Layer(8, 1, 512, block_tokens=64),
    "256 dims, 32-token blocks, 3 stripes": Layer(4, 4, 256, block_tokens=32, stripes=3),
    "256 dims, a window shorter than a tile": Layer(8, 4, 256, window_tokens=41),
    "256 dims, a window of whole tiles, 64-token blocks": Layer(8, 2, 256, window_tokens=513, block_tokens=64),
    "128 dims, 16 query heads, window, 3 stripes": Layer(2, 16, 128, window_tokens=333, stripes=3),
    "gpt-oss window, sinks": Layer(8, 8, 64, window_tokens=128, has_sinks=True),
    "gpt-oss full, sinks": Layer(8, 8, 64, has_sinks=True),
    "128 dims, window, 64-token blocks": Layer(8, 4, 128, window_tokens=1000, block_tokens=64),
    "Qwen3.5-27B, 6 query heads to a KV head": Layer(4, 6, 256),
    "64 dims, 3 query heads, window, sinks": Layer(4, 3, 64, window_tokens=700, has_sinks=True),
}
ENGINE_CHUNKS = (1100, 37, 1500, 1024)
TIMED = (
    ("31B window, 1 x 8,192", WINDOW_31B, 1, 8192, 0),
    ("31B window, 1 x 8,192 over 30,000", WINDOW_31B, 1, 8192, 30_000),
    ("31B window, 8 x 1,024", WINDOW_31B, 8, 1024, 0),
    ("31B window, 1 x 512 over 30,000", WINDOW_31B, 1, 512, 30_000),
    ("256 dims, causal, 1 x 8,192", Layer(16, 2, 256), 1, 8192, 0),
    ("31B full, latent, 1 x 8,192", FULL_31B, 1, 8192, 0),
    ("31B full, latent, 1 x 8,192 over 16,384", FULL_31B, 1, 8192, 16_384),
    ("31B full, latent, 1 x 4,096 over 65,536", FULL_31B, 1, 4096, 65_536),
    ("31B full, latent, 8 x 1,024", FULL_31B, 8, 1024, 0),
    ("26B full, latent, 8 x 256 over 32,768", Layer(2, 8, 512, rotary=64), 8, 256, 32_768),
    ("26B window, 8 x 256 over 32,768", Layer(8, 2, 256, window_tokens=1024), 8, 256, 32_768),
    ("35B full, 8 x 256 over 32,768", Layer(2, 8, 256), 8, 256, 32_768),
    ("gpt-oss full, 8 x 256 over 32,768", Layer(8, 8, 64, has_sinks=True), 8, 256, 32_768),
    ("31B full, latent, 1 x 256 over 16,384", FULL_31B, 1, 256, 16_384),
    ("31B full, pair, 1 x 8,192", Layer(4, 8, 512), 1, 8192, 0),
    ("E4B full, pair, 1 x 8,192 over 16,384", LAYERS["E4B full, pair"], 1, 8192, 16_384),
    ("E4B full, pair, 8 x 1,024", LAYERS["E4B full, pair"], 8, 1024, 0),
    ("E4B window, 1 x 8,192 over 30,000", LAYERS["E4B window"], 1, 8192, 30_000),
    ("gpt-oss full, 1 x 8,192", Layer(8, 8, 64, has_sinks=True), 1, 8192, 0),
    ("gpt-oss full, 1 x 8,192 over 16,384", Layer(8, 8, 64, has_sinks=True), 1, 8192, 16_384),
    ("gpt-oss window, 1 x 8,192 over 16,384", Layer(8, 8, 64, window_tokens=128, has_sinks=True), 1, 8192, 16_384),
    ("Qwen3, 1 x 8,192", QWEN3, 1, 8192, 0),
    ("Qwen3, 4 x 2,048", QWEN3, 4, 2048, 0),
)


def is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == CAPABILITY


def checks() -> list[Check]:
    if not is_hopper():
        return []
    return [
        *((f"hopper prefill {name}", partial(_prefill, layer)) for name, layer in CHECKED.items()),
        *((f"hopper engine {name}", partial(_engine, name)) for name in WIDE_CONFIGS),
    ]


def heads_of(layer: Layer) -> Heads:
    kinds = layer.mask.is_windowed, layer.mask.is_chunked
    return Heads(layer.kv_heads, layer.query_heads, layer.dim, layer.rotary > 0, *kinds)


def _prefill(layer: Layer) -> str:
    """Lengths around pages, tiles and windows; chunks at, above and below what a Hopper kernel takes."""
    least = heads_of(layer).least_queries
    cases = [
        (0, least + 77, least + 77),
        (100, least, least),
        (37, 5, 5),
        (16_384, least + 13, least + 13),
        (64, least - 1, least - 1),
        (1025, 2 * least + 1, least + 1),
        (2048, least + 64, least + 64),
        (2049, 1, 1),
        (5003, least + 200, least + 3),
        (1, 2 * least, 2 * least),
    ]
    lengths, chunks = [c[0] for c in cases], [c[1:] for c in cases]
    paged = make_pages(layer, lengths, DEVICE, torch.bfloat16, room_tokens=2 * least, arena_bytes=ARENA_BYTES)
    scratch = _scratch(layer, max(lengths) + 2 * least)
    for x in (scratch.edges(heads_of(layer)), *([scratch.rotated(heads_of(layer))] if layer.rotary else [])):
        x.fill_(float("nan"))
    return judge(*run_prefill(paged, chunks, scratch))


def _engine(name: str) -> str:
    """bf16 logits of a whole model, chunk after chunk, against the plain torch path in float32."""
    tokens = np.random.default_rng(5).integers(3, WIDE_CONFIGS[name]["vocab_size"], size=sum(ENGINE_CHUNKS))
    tokens = tokens.astype(np.int32)
    exact = _chunk_logits(name, tokens, torch.float32, fused=False)
    plain = _chunk_logits(name, tokens, torch.bfloat16, fused=True, hopper=False)
    got = _chunk_logits(name, tokens, torch.bfloat16, fused=True, hopper=True)
    return judge(got, exact, plain)


def _chunk_logits(
    name: str, tokens: NDArray[np.int32], dtype: torch.dtype, *, fused: bool, hopper: bool = False
) -> torch.Tensor:
    """Logits after each of `tokens`, which come in chunks; some are large enough for a Hopper kernel."""
    device = torch.device(DEVICE)
    runner, manager = make_runner(name, device, dtype, len(tokens), 1, fused=fused, graphs=False, hopper=hopper)
    if isinstance(runner, CudaRunner):
        large = [tiling.large for tiling in runner.model.tilings]
        longest = np.array([(0, 0, n, 0, 0, n) for n in (max(ENGINE_CHUNKS),)], dtype=np.int32)
        if hopper and not all(one is not None and one.takes(longest).all() for one in large):
            raise AssertionError(f"no chunk is large enough for {large}: nothing would be checked")
        if not hopper and any(large):
            raise AssertionError("the Hopper kernels were not turned off")
    manager.start(0, len(tokens))
    nobody = np.zeros(0, dtype=np.int64)
    logits, start = [], 0
    for count in ENGINE_CHUNKS:
        manager.extend(0, start + count)
        chunk = PromptChunk(0, start, tokens[start : start + count], samples=True)
        batch = Batch(0, nobody, nobody, [chunk], np.zeros(1, dtype=np.int8), manager.take_changes() or NO_CHANGES)
        logits.append(runner.forward(batch, all_logits_slots=frozenset({0})).prompt_logits[0](slice(0, count)).clone())
        start += count
    return torch.cat(logits).double()


def _scratch(layer: Layer, max_model_len: int) -> PrefillScratch:
    if not heads_of(layer).has_kernel:
        raise AssertionError(f"{layer} has no Hopper kernel: nothing would be checked")
    return PrefillScratch([heads_of(layer)], max_model_len, torch.device(DEVICE))


def timings(words: Sequence[str] = ()) -> None:
    """Print a line per step, with and without the Hopper kernels; given words, only those whose name has one."""
    if not is_hopper():
        print(f"hopper: nothing to time on compute capability {torch.cuda.get_device_capability()}")
        return
    arena = random_arena(24 * 2**30)
    for name, layer, sequences, tokens, past in TIMED:
        if words and not any(word in name for word in words):
            continue
        bare = Bare.make(layer, sequences, past + 1, arena)
        told = []
        for scratch in (None, _scratch(layer, sequences * (past + tokens))):
            step, flops = prefill_step(bare, sequences, tokens, past, scratch)
            us = microseconds(step, repeat=1, rounds=5)
            told.append(f"{us:9.1f} us {flops / us / 1e6:6.1f} TFLOP/s")
        print(f"hopper {name:44s} plain {told[0]}   hopper {told[1]}", flush=True)


if __name__ == "__main__":
    timings(sys.argv[1:])
