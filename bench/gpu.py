"""Speed on a GPU: start-up, one request alone, and many at once, for models in real shapes with random weights.

    python3 -m bench.gpu [--model gemma-4-31b …] [--kv-cache-dtype int8_per_token_head …] [--runs 3] [--trace]

Each figure is the median of `--runs` rounds, beside the share of the memory roof that it reaches: bytes that steps
cannot avoid to read (weights once, the past that each sequence sees) over the time, against what a plain sum over
4 GiB reads. The workload `prefill` is 16 prompts of 32,768 tokens. With several KV formats, those after the first are
told beside it. Experts are chosen uniformly at random (`bench.uniform_routing`). `--trace` adds where the time of one
decoding step goes, kernel by kernel. `--adapters 16` measures each workload and traces once more, with requests over so
many random adapters in turn, and prints the share of the rate without. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.random_adapters import random_adapter
from bench.timing import exclusive_times
from bench.uniform_routing import distinct_experts, route_uniformly
from bench.vllm_weights import draw_as_vllm
from windowpane.engine.accounts import accounts
from windowpane.engine.start import Started, start
from windowpane.measure.rounds import CountingRunner, Timing, roof_bytes_per_second, run_round, warm_up
from windowpane.measure.workloads import WORKLOADS, Workload
from windowpane.models.blocks import Experts, each
from windowpane.schedule.request import Request, SamplingParams

GIB = 2**30
SHORT_TOKENS = 4096  # the longest sequence of b1 and serve
ADAPTER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL_WORKLOADS = {**WORKLOADS, "prefill": Workload("prefill", 16, (32_768, 32_768), (1, 1))}


@dataclass(frozen=True)
class Case:
    """`serve` requests at once; `turns` sessions of so many tokens. `flags` are the engine's."""

    serve: int
    flags: dict[str, Any]
    turns: tuple[int, int] | None = None


# Gemma 4 31B gets the KV bytes that vLLM 0.26.0 had left on the same card.
CASES = {
    "qwen3-0.6b": Case(256, {}),
    "gemma-4-e4b": Case(256, {}, (8, 32_768)),
    "gemma-4-31b": Case(128, {"kv_cache_memory_bytes": 69_510_103_040, "max_num_seqs": 128}, (4, 65_536)),
    "gemma-4-31b-awq-4bit": Case(128, {"kv_cache_memory_bytes": 69_510_103_040, "max_num_seqs": 128}),
    "gemma-4-26b-a4b": Case(256, {}, (8, 32_768)),
    "gpt-oss-20b": Case(256, {}, (8, 32_768)),
    "qwen3.5-35b-a3b": Case(256, {}, (8, 32_768)),
    "qwen3.5-27b": Case(128, {"max_num_seqs": 128}, (4, 65_536)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=CASES, help="default: all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workload", action="append", choices=ALL_WORKLOADS, help="default: b1 and serve")
    parser.add_argument("--kv-cache-dtype", action="append", help="as of serve; several are compared. Default: auto")
    parser.add_argument("--mamba-ssm-cache-dtype", default="auto", help="as of serve")
    parser.add_argument("--max-num-batched-tokens", type=int, help="as of serve")
    parser.add_argument("--prompts", type=int, default=16, help="of the workload prefill")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--eager", action="store_true", help="no graphs")
    parser.add_argument("--adapters", type=int, default=0, help="also with requests over so many adapters in turn")
    parser.add_argument("--adapter-rank", type=int, default=16)
    parser.add_argument("--adapter-targets", nargs="*", default=ADAPTER_TARGETS, help="modules that they change")
    parser.add_argument("--own-routing", action="store_true", help="experts as random weights choose them")
    parser.add_argument("--vllm-weights", action="store_true", help="random weights as vLLM's dummy format makes them")
    given = parser.parse_args()
    if not given.own_routing:
        route_uniformly()
    if given.vllm_weights:
        draw_as_vllm()
    results = []
    roof = roof_bytes_per_second(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, reads {roof / 1e12:.2f} TB/s", flush=True)
    for name in given.model or CASES:
        of_model = []
        for kv_cache_dtype in given.kv_cache_dtype or ["auto"]:
            of_model.append(measure(name, CASES[name], kv_cache_dtype, given, roof))
            gc.collect()
            torch.cuda.empty_cache()
        compare(of_model)
        results += of_model
    print(json.dumps(results), flush=True)


def compare(results: list[dict[str, Any]]) -> None:
    """Each KV format's rates as shares of the first one's."""
    for other in results[1:]:
        for workload in ALL_WORKLOADS:
            rates = [r[workload].get("rate") for r in (results[0], other) if workload in r]
            if all(rates) and rates:
                formats = f"{other['kv_cache_dtype']} against {results[0]['kv_cache_dtype']}"
                print(f"  {other['model']} {workload}, {formats}: {rates[1] / rates[0]:.3f} of its rate", flush=True)


def measure(name: str, case: Case, kv_cache_dtype: str, given: argparse.Namespace, roof: float) -> dict[str, Any]:
    began = time.perf_counter()
    turns, prefill = ("turns" in (given.workload or ())), ("prefill" in (given.workload or ()))
    flags: dict[str, Any] = {"load_format": "dummy", "device": "cuda", "enforce_eager": given.eager}
    # Sessions come back with their prompt and more: that is what restore points are for.
    longest = 66_560 if turns else ALL_WORKLOADS["prefill"].longest if prefill else SHORT_TOKENS
    flags |= {"max_model_len": longest, "enable_prefix_caching": turns, "kv_cache_dtype": kv_cache_dtype}
    flags["mamba_ssm_cache_dtype"] = given.mamba_ssm_cache_dtype
    if given.max_num_batched_tokens:
        flags["max_num_batched_tokens"] = given.max_num_batched_tokens
    if given.adapters:
        flags |= {"enable_lora": True, "max_loras": given.adapters, "max_lora_rank": given.adapter_rank}
        flags["lora_target_modules"] = given.adapter_targets
    started = start(name, {**flags, **case.flags})
    torch.cuda.synchronize()
    found: dict[str, Any] = {"model": name, "kv_cache_dtype": kv_cache_dtype}
    found["start_seconds"] = round(time.perf_counter() - began, 1)
    print(f"\n{name}, KV {kv_cache_dtype}: started in {found['start_seconds']} s", flush=True)
    for row in accounts(started.plan, started.reports):
        predicted, measured = row.predicted_bytes / GIB, row.measured_bytes / GIB
        print(f"  {row.name:24} predicted {predicted:8.3f} GiB, measured {measured:8.3f}")
    for experts in list(each(started.spec.decoder, Experts))[:1]:
        sizes = experts.router.experts, experts.router.chosen
        rows = ", ".join(f"{distinct_experts(*sizes, n):.0f} for {n} rows" for n in (1, case.serve))
        print(f"  distinct experts a layer and step, of {sizes[0]}: {rows}")
    warm_up(started.engine, started.spec.vocab_size)
    runner = started.runner
    started.engine.runner = CountingRunner(started)
    for workload in given.workload or ("b1", "serve"):
        found[workload] = _rounds(started, workload, case, given, roof)
        if given.adapters:
            found[f"{workload} adapted"] = _rounds(started, workload, case, given, roof, know_adapters(started, given))
            rates = [found[name].get("rate") for name in (f"{workload} adapted", workload)]
            if all(rates):
                what = f"{given.adapters} adapters of rank {given.adapter_rank}"
                print(f"  {workload}, {what}: {rates[0] / rates[1]:.3f} of its rate", flush=True)
    found["peak_bytes"] = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.max_memory_reserved()
    print(f"  peak {found['peak_bytes'] / GIB:.2f} GiB allocated, {reserved / GIB:.2f} reserved")
    if given.trace:
        started.engine.runner = runner
        for rows in (1, case.serve):
            found[f"trace_{rows}"] = trace(started, rows)
            if given.adapters:
                found[f"trace_{rows} adapted"] = trace(started, rows, know_adapters(started, given))
        found["trace_prefill"] = trace_prefill(started)
    return found


def know_adapters(started: Started, given: argparse.Namespace) -> list[int]:
    """The numbers of random adapters, made when they are first asked for."""
    adapters, held = started.engine.adapters, started.runner.adapters
    assert adapters is not None and held is not None
    if not adapters.loaded:
        for seed in range(given.adapters):
            adapters.add(str(seed), "random", random_adapter(held, seed))
    return [adapter.number for adapter in adapters.loaded.values()]


def _rounds(
    started: Started, workload: str, case: Case, given: argparse.Namespace, roof: float, adapters: Sequence[int] = (0,)
) -> dict[str, Any]:
    timings: list[Timing] = []
    for run in range(given.runs):
        described = ALL_WORKLOADS[workload]
        if workload == "serve":
            described = replace(described, requests=case.serve)
        if workload == "prefill":
            described = replace(described, requests=given.prompts)
        if workload == "turns" and case.turns is not None:
            sessions, length = case.turns
            described = replace(described, requests=sessions, input_tokens=(length, length))
        rounds = list(described.rounds(started.spec.vocab_size, seed=run))
        for requests in rounds:
            for i, request in enumerate(requests):
                request.adapter = adapters[i % len(adapters)]
        timings += [run_round(started.engine, requests) for requests in rounds]
    if workload == "turns":
        return _turns(timings)
    if workload == "prefill":
        return _prefill(timings)
    rates = [t.output_rate for t in timings]
    steps = [1 / statistics.median(t.between_tokens) for t in timings]
    shares = [t.bytes_per_second / roof for t in timings]
    result = {
        "output_tokens_per_second": round(statistics.median(rates), 1),
        "rate": statistics.median(rates),
        "runs": [round(r, 1) for r in rates],
        "seconds": round(statistics.median(t.seconds for t in timings), 3),
        "roof_share": round(statistics.median(shares), 3),
        "ttft_ms": round(1e3 * statistics.median(s for t in timings for s in t.first_token), 2),
        "itl_ms": round(1e3 * statistics.median(s for t in timings for s in t.between_tokens), 3),
        "steps_per_second": round(statistics.median(steps), 1),
        "preemptions": started.engine.scheduler.preemptions,
    }
    print(f"  {workload}: {result}", flush=True)
    return result


def _prefill(timings: list[Timing]) -> dict[str, Any]:
    rate = statistics.median(t.input_tokens / t.seconds for t in timings)
    result = {
        "input_tokens_per_second": round(rate, 1),
        "rate": rate,
        "seconds": round(statistics.median(t.seconds for t in timings), 3),
    }
    print(f"  prefill: {result}", flush=True)
    return result


def _turns(timings: list[Timing]) -> dict[str, Any]:
    """Seconds until all sessions have their answers: the first time, and when they come back."""
    first, following = ([round(t.seconds, 3) for t in timings[turn::2]] for turn in (0, 1))
    result = {
        "first_seconds": statistics.median(first),
        "next_seconds": statistics.median(following),
        "first_runs": first,
        "next_runs": following,
        "first_input_tokens_per_second": round(timings[0].input_tokens / first[0], 1),
    }
    print(f"  turns: {result}", flush=True)
    return result


def trace(started: Started, rows: int, adapters: Sequence[int] = (0,)) -> list[tuple[str, int, float]]:
    """Kernels of one decoding step of `rows` sequences over 800 past tokens: name, launches, microseconds."""
    engine = started.engine
    requests = _requests(started, rows, 800, 64, adapters)
    while any(len(r.output) < 8 for r in requests if r.finish_reason is None) and engine.has_work:
        engine.step()
    return _profiled(started, requests, f"one step of {len(engine.scheduler.running)} rows", steps=4)


def trace_prefill(started: Started, prompts: int = 8, length: int = 1024) -> list[tuple[str, int, float]]:
    return _profiled(started, _requests(started, prompts, length, 2), f"a step of {prompts} × {length} tokens", steps=1)


def _requests(
    started: Started, count: int, length: int, new_tokens: int, adapters: Sequence[int] = (0,)
) -> list[Request]:
    prompts = torch.randint(started.spec.vocab_size, (count, length), dtype=torch.int32).numpy()
    params = SamplingParams(max_tokens=new_tokens, temperature=0)
    requests = [Request(f"trace {i}", prompt, params) for i, prompt in enumerate(prompts)]
    for i, request in enumerate(requests):
        request.adapter = adapters[i % len(adapters)]
        started.engine.add(request)
    return requests


def _profiled(started: Started, requests: list[Request], what: str, steps: int) -> list[tuple[str, int, float]]:
    engine = started.engine
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - began) / steps
    for request in requests:
        engine.cancel(request)
    while engine.has_work:
        engine.step()
    spent = exclusive_times(profile)
    table = sorted(((n, round(len(t) / steps), sum(t) / steps) for n, t in spent.items()), key=lambda r: -r[2])
    total = sum(row[2] for row in table)
    print(f"  {what}: wall {wall * 1e6:.0f} µs, kernels {total:.0f} µs")
    for kernel, launches, microseconds in table[:14]:
        print(f"    {microseconds:9.1f} µs {launches:5d} × {kernel[:70]}", flush=True)
    return [(n[:70], c, round(t, 1)) for n, c, t in table[:14]]


if __name__ == "__main__":
    main()
