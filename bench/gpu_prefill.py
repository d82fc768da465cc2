"""Where the time of a long prompt goes on a GPU, part by part, with the TFLOP/s and the share of the roof of each.

    python3 -m bench.gpu_prefill [--model gemma-4-31b] [--prompt 65536] [--chunk 8192] [--kernels 12]

Runs a prompt chunk by chunk and profiles the first, the middle and the last chunk but one. FLOPs are those that the
chunk cannot avoid: what a window hides, or nobody asks for, does not count. The roof is what a large bf16 product
reaches in the same run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from typing import Any

import numpy as np
import torch

from bench.timing import exclusive_times
from windowpane.attention.mask import Mask
from windowpane.engine.start import Started, start
from windowpane.kv.retention import Full
from windowpane.models.blocks import Attention
from windowpane.models.running import runnable
from windowpane.models.spec import ModelSpec
from windowpane.schedule.request import Request, SamplingParams

PRODUCTS, FULL, SLIDING = "matrix products", "full attention", "sliding attention"
STATES, REST = "recurrent states", "rest"
# Kernels by what their names contain; the first that fits counts.
_PARTS = (
    ("wide_kernel", FULL),
    ("_rotate_kernel", FULL),
    ("_latent_kernel", FULL),
    ("pair_kernel", SLIDING),
    ("_edges_kernel", SLIDING),
    ("gemm", PRODUCTS),
    ("nvjet", PRODUCTS),
    ("cutlass", PRODUCTS),
    *((kernel, STATES) for kernel in ("convolve_kernel", "solve_kernel", "pass_kernel", "gated_norm_kernel")),
)


def part_of(kernel: str) -> str:
    return next((part for piece, part in _PARTS if piece in kernel), REST)


def attention_flops(layer: Attention, start: int, stop: int) -> int:
    """Of tokens [start, stop) of one sequence: two products over all that each can see."""
    mask = Mask.of(layer.cache.retention)
    return 4 * layer.query_width * sum(len(mask.seen(position)) for position in range(start, stop))


def chunk_flops(spec: ModelSpec, start: int, stop: int) -> dict[str, int]:
    """What a chunk in the middle of a prompt has to compute: after the last layer that owns KV nobody asks for more,
    and of that layer only for K and V.
    """
    decoder = runnable(spec)
    flops = {PRODUCTS: 0, FULL: 0, SLIDING: 0}
    attends = {attention.layer: attention for attention in decoder.attentions}
    assert decoder.last_keeper is not None
    for layer in range(decoder.last_keeper + 1):
        only_kv = layer == decoder.last_keeper and layer in attends
        for tensor in spec.tensors:
            if f"layers.{layer}." not in tensor.name or len(tensor.shape) != 2:
                continue
            if not only_kv or "k_proj" in tensor.name or "v_proj" in tensor.name:
                flops[PRODUCTS] += 2 * tensor.elements * (stop - start)
        if layer in attends and not only_kv:
            part = FULL if isinstance(attends[layer].cache.retention, Full) else SLIDING
            flops[part] += attention_flops(attends[layer], start, stop)
    return flops


def roof_flop_per_s() -> float:
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    best = float("inf")
    for _ in range(12):
        torch.cuda.synchronize()
        began = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * 8192**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-4-31b")
    parser.add_argument("--prompt", type=int, default=65_536)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--kernels", type=int, default=0, help="tell so many of the last chunk that is profiled")
    given = parser.parse_args()
    flags: dict[str, Any] = {"load_format": "dummy", "device": "cuda", "enable_prefix_caching": False}
    flags |= {"max_model_len": given.prompt + 64, "max_num_batched_tokens": given.chunk, "max_num_seqs": 16}
    started = start(given.model, flags)
    roof = roof_flop_per_s()
    print(f"{torch.cuda.get_device_name()}: a large product reaches {roof / 1e12:.0f} TFLOP/s", flush=True)
    prompt(started, given, profiled=())  # kernels are compiled
    began = time.perf_counter()
    prompt(started, given, profiled=())
    seconds = time.perf_counter() - began
    print(f"{given.prompt:,} tokens in {seconds:.2f} s, {given.prompt / seconds:,.0f} tok/s", flush=True)
    chunks = given.prompt // given.chunk
    found = prompt(started, given, profiled=sorted({0, chunks // 2, max(0, chunks - 2)}))
    results = [
        report(started.spec, start_token, given.chunk, by_part(spent), wall, roof) for start_token, spent, wall in found
    ]
    _, spent, _ = found[-1]
    for name, times in sorted(spent.items(), key=lambda kernel: -sum(kernel[1]))[: given.kernels]:
        print(f"  {sum(times) / 1e3:9.2f} ms {len(times):5} × {name[:90]}")
    print(json.dumps({"bench": "gpu_prefill", "model": given.model, "seconds": seconds, "chunks": results}))


def prompt(
    started: Started, given: argparse.Namespace, profiled: tuple[int, ...] | list[int]
) -> list[tuple[int, dict[str, list[float]], float]]:
    """Run one prompt; of the chunks asked for: first token, microseconds of each launch by kernel, and wall seconds."""
    engine, found = started.engine, []
    tokens = np.random.default_rng(0).integers(5, started.spec.vocab_size, given.prompt).astype(np.int32)
    request = Request("long", tokens, SamplingParams(max_tokens=1))
    engine.add(request)
    chunk = 0
    while request.finish_reason is None:
        if chunk not in profiled:
            engine.step()
        else:
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                began = time.perf_counter()
                engine.step()
                torch.cuda.synchronize()
                wall = time.perf_counter() - began
            found.append((chunk * given.chunk, exclusive_times(profile), wall))
        chunk += 1
    while engine.has_work:
        engine.step()
    torch.cuda.synchronize()
    return found


def by_part(spent: dict[str, list[float]]) -> dict[str, float]:
    """Seconds."""
    parts: dict[str, float] = defaultdict(float)
    for kernel, times in spent.items():
        parts[part_of(kernel)] += sum(times) / 1e6
    return parts


def report(
    spec: ModelSpec, start_token: int, chunk: int, spent: dict[str, float], wall: float, roof: float
) -> dict[str, Any]:
    flops = chunk_flops(spec, start_token, start_token + chunk)
    if not flops[SLIDING]:  # heads of 256 dims and fewer have one kernel for both
        spent[FULL] += spent.pop(SLIDING, 0.0)
    print(f"\n{chunk:,} tokens after {start_token:,}: {1e3 * wall:.0f} ms, {1e3 * sum(spent.values()):.0f} in kernels")
    parts = {}
    for part in (PRODUCTS, FULL, SLIDING, STATES, REST):
        seconds = spent.get(part, 0.0)
        rate = flops.get(part, 0) / seconds if seconds else 0.0
        parts[part] = {"ms": round(1e3 * seconds, 2), "tflop_per_s": round(rate / 1e12, 1), "share": rate / roof}
        of_roof = f"{rate / 1e12:7.0f} TFLOP/s, {rate / roof:4.0%} of the roof" if rate else ""
        print(f"  {part:18} {1e3 * seconds:8.1f} ms {of_roof}", flush=True)
    return {"start": start_token, "wall_ms": round(1e3 * wall, 1), "parts": parts}


if __name__ == "__main__":
    main()
