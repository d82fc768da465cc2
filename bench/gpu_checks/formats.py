"""Coded KV on a GPU: kernels against float64 over the codecs' own pages, whole models, and timings beside bfloat16.

python3 -m bench.gpu_checks.formats [--sweep] [WORD …]     timings of steps whose name has one of the words, or
    timings under other tunings
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from bench.gpu_checks import hopper
from bench.gpu_checks.attention import (
    ARENA_BYTES,
    DEVICE,
    FULL_31B,
    LENGTHS,
    LLAMA_4,
    QWEN3,
    WINDOW_31B,
    Bare,
    DecodeStep,
    check_decode,
    check_rows,
    judge,
    random_arena,
)
from bench.gpu_checks.attention_cases import Layer, make_pages, run_prefill
from bench.gpu_checks.engine import forced_logits, make_runner
from bench.timing import microseconds
from tests.running.small_models import CONFIGS, WINDOW
from windowpane.attention.hopper.scratch import PrefillScratch
from windowpane.attention.triton.decode_tunings import CODED_TUNINGS, Tuning
from windowpane.attention.triton.widen import plan_past, widen
from windowpane.kv.decoded_past import TOGETHER_BYTES
from windowpane.kv.formats import FORMATS
from windowpane.schedule.batch import Batch, PromptChunk

Check = tuple[str, Callable[[], str]]

CODED = [name for name, fmt in FORMATS.items() if fmt.family != "float"]
LAYERS = {
    "31B window": WINDOW_31B,
    "31B full, latent": FULL_31B,
    "Qwen3": QWEN3,
    "E4B full, pair": Layer(2, 4, 512),
    "latent, 1/2 of 64 dims": Layer(2, 2, 64, rotary=32, window_tokens=200),
    "latent, 1/4 of 128 dims, 3 stripes": Layer(1, 16, 128, rotary=32, stripes=3),
    "64 dims, 32-token blocks": Layer(5, 3, 64, block_tokens=32),
    "window, soft-capped, sinks": Layer(8, 2, 256, window_tokens=1024, softcap=2.0, has_sinks=True),
    "latent, soft-capped": replace(FULL_31B, softcap=2.0),
    "Llama 4, chunks of 512": replace(LLAMA_4, chunk_tokens=512),
}
MODELS = ("gemma3", "gemma4 everything", "gemma4 K = V", "llama with biases")
TEACHER_TOKENS = 400
MOST_OTHER_CODES = 1e-3  # of the first layer's


def checks() -> list[Check]:
    found: list[Check] = []
    for fmt in CODED:
        for name, layer in LAYERS.items():
            coded = replace(layer, kv_format=fmt)
            found.append((f"formats decode {fmt} {name}", partial(check_decode, coded, torch.bfloat16)))
            found.append((f"formats rows {fmt} {name}", partial(check_rows, coded, torch.bfloat16)))
            found.append((f"formats prefill {fmt} {name}", partial(_prefill, coded, torch.bfloat16)))
        small = Layer(2, 4, 64, window_tokens=70, kv_format=fmt)
        found.append((f"formats decode {fmt} float32", partial(check_decode, small, torch.float32)))
        found += [(f"formats model {fmt} {name}", partial(_model, name, fmt)) for name in MODELS]
    return found


def _prefill(layer: Layer, dtype: torch.dtype) -> str:
    """Small chunks by the plain kernel; where Hopper kernels take large ones, those too."""
    chunks = [(n % 700 + 1, n % 700 + 1) for n in range(0, 170 * len(LENGTHS), 170)]
    paged = make_pages(layer, LENGTHS, DEVICE, dtype, room_tokens=2048, arena_bytes=ARENA_BYTES)
    told = judge(*run_prefill(paged, chunks))
    heads = hopper.heads_of(layer)
    if not (hopper.is_hopper() and heads.has_kernel):
        return told
    longest = heads.least_queries + 200
    lengths, chunks = [0, 37, 5003], [(longest - 123,) * 2, (5, 5), (longest,) * 2]
    paged = make_pages(layer, lengths, DEVICE, dtype, room_tokens=longest, arena_bytes=ARENA_BYTES)
    scratch = PrefillScratch([heads], 5003 + longest, torch.device(DEVICE))
    return f"{told}; hopper {judge(*run_prefill(paged, chunks, scratch))}"


def _model(name: str, fmt: str) -> str:
    """Kernels in float32 against plain torch in float32, the same format in both: a fixed text, half of it decoded.

    Sums in another order take a number to the next code now and then. Nothing coded comes before the first layer's
    codes, so there that is rare. Each such step moves what later layers code, and int4's steps are wide: of the logits,
    those of most tokens must lie closer than the format itself moves them.
    """
    tokens = np.random.default_rng(5).integers(3, CONFIGS[name]["vocab_size"], size=TEACHER_TOKENS)
    shares = _other_codes(name, tokens[: TEACHER_TOKENS // 2], fmt)
    logits = partial(forced_logits, name, tokens, torch.float32)
    got, want, plain = (
        logits(fused=True, kv_cache_dtype=fmt), logits(fused=False, kv_cache_dtype=fmt), logits(fused=False)
    )  # fmt: skip
    difference, effect = _median_error(got, want), _median_error(want, plain)
    told = f"differs by {difference:.1e} where the format changes {effect:.1e}; other codes, by layer: " + " ".join(
        f"{share:.2%}" for share in shares
    )
    if not (difference <= 0.25 * effect and shares[0] <= MOST_OTHER_CODES):
        raise AssertionError(told)
    return told


def _median_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())


def _other_codes(name: str, tokens: np.ndarray, fmt: str) -> list[float]:
    """After one chunk of `tokens`, which share of the numbers in each layer's pages kernels took to another code."""
    runners = []
    for fused in (False, True):
        runner, manager = make_runner(
            name, torch.device(DEVICE), torch.float32, len(tokens), 1, fused=fused, graphs=False, kv_cache_dtype=fmt
        )
        manager.start(0, len(tokens))
        manager.extend(0, len(tokens))
        nobody, chunk = np.zeros(0, dtype=np.int64), PromptChunk(0, 0, tokens.astype(np.int32), samples=True)
        runner.forward(Batch(0, nobody, nobody, [chunk], np.zeros(1, dtype=np.int8), manager.take_changes()))
        runners.append(runner)
    plain, kernels = runners
    # Both were given the same pages, so plain torch can read those that kernels wrote.
    layers, seen = plain.pages.layers, (0, len(tokens) - WINDOW + 1, len(tokens))
    want = {index: layers[index].past(*seen) for index in sorted(layers)}
    plain.arena.copy_(kernels.arena)
    return [_other_share(layers[index].past(*seen), rows) for index, rows in want.items()]


def _other_share(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Of rows: numbers that differ by more than rounding a row's scale explains, and by less than a step of int8."""
    a, b = torch.cat(list(got)), torch.cat(list(want))
    return float(((a - b).abs() > b.abs().amax(-1, keepdim=True) / 200).double().mean())


DECODING = (
    ("31B window, 64 x 1,023", WINDOW_31B, 64, 30_000),
    ("31B window, 128 x 1,023", WINDOW_31B, 128, 30_000),
    ("31B full, latent, 8 x 65,536", FULL_31B, 8, 65_536),
    ("31B full, latent, 128 x 843", FULL_31B, 128, 843),
    ("full pair 512, 8 x 32,768", Layer(4, 8, 512), 8, 32_768),
    ("Qwen3, 256 x 843", QWEN3, 256, 843),
)
TIMED_FORMATS = (None, "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")


def timings(words: Sequence[str] = ()) -> None:
    """Decode steps per format, each with the bytes it reads; then the decoding of a chunk's past."""
    arena = random_arena(24 * 2**30)
    for name, layer, sequences, past in DECODING:
        for fmt in TIMED_FORMATS:
            title = f"formats decode {name} {fmt or 'bfloat16'}"
            if words and not any(word in title for word in words):
                continue
            step = _step(layer, fmt, sequences, past, arena)
            us = microseconds(step)
            print(f"{title:70s} {us:9.1f} us {step.kv_bytes / us / 1e6:8.2f} TB/s", flush=True)
    for fmt in TIMED_FORMATS[1:]:
        title = f"formats widen 31B full, latent, 32,768 of past {fmt}"
        if not words or any(word in title for word in words):
            us = microseconds(_widening(replace(FULL_31B, kv_format=fmt), 32_768, arena))
            print(f"{title:70s} {us:9.1f} us", flush=True)


# Tile tokens, programs, warps, stages and registers.
PAIR_TRIALS = ((16, 7, 1, 4), (16, 8, 1, 3), (16, 10, 1, 3, 200), (16, 12, 1, 4, 168), (64, 2, 4, 5))
LATENT_TRIALS = ((32, 2, 4, 5), (32, 2, 4, 4), (32, 3, 4, 4, 168), (16, 3, 2, 4), (16, 4, 2, 3), (16, 3, 4, 4, 168))


def sweep(words: Sequence[str] = ()) -> None:
    """Other tunings, and the best of them for each step. E4M3 has that of int8: ask for it by name."""
    arena = random_arena(24 * 2**30)
    best: list[str] = []
    for name, layer, sequences, past in DECODING:
        for fmt in TIMED_FORMATS[1:]:
            key = (layer.dim, layer.rotary > 0, FORMATS[fmt or ""].element_bits)
            title = f"formats decode {name} {fmt}"
            if not any(word in title for word in words or ("",)) or (fmt not in words and "fp8" in title):
                continue
            kept, found = CODED_TUNINGS[key], []
            for trial in LATENT_TRIALS if layer.rotary else PAIR_TRIALS:
                CODED_TUNINGS[key] = Tuning(*trial)
                try:
                    us = microseconds(_step(layer, fmt, sequences, past, arena))
                except OutOfResources as refusal:
                    print(f"{title:60s} {trial!s:22s} {refusal}", flush=True)
                    continue
                found.append((us, trial))
                print(f"{title:60s} {trial!s:22s} {us:9.1f} us", flush=True)
            CODED_TUNINGS[key] = kept
            if found:
                best.append(f"{title:60s} {min(found)[1]!s:22s} {min(found)[0]:9.1f} us")
    print("best:", *best, sep="\n")


def _step(layer: Layer, fmt: str | None, sequences: int, past: int, arena: torch.Tensor) -> DecodeStep:
    lengths = past + torch.randint(0, 64, (sequences,)) * (layer.window_tokens is not None)
    return DecodeStep(Bare.make(replace(layer, kv_format=fmt), sequences, past + 64, arena), lengths)


def _widening(layer: Layer, past: int, arena: torch.Tensor) -> Callable[[], None]:
    bare = Bare.make(layer, 1, past + 1, arena)
    segments = np.array([(0, past, past + 8192, 0, 0, 8192)], dtype=np.int32)
    plan = plan_past(segments, bare.for_kernels, torch.bfloat16, TOGETHER_BYTES)[0]
    on_device = torch.from_numpy(segments).to(DEVICE)
    decoded = torch.empty(TOGETHER_BYTES, dtype=torch.uint8, device=DEVICE)

    def step() -> None:
        widen(bare.for_kernels, on_device, plan, decoded, torch.bfloat16)

    return step


if __name__ == "__main__":
    (sweep if "--sweep" in sys.argv else timings)([word for word in sys.argv[1:] if not word.startswith("-")])
