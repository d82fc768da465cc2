"""What a benchmark run prints: a small table, the machine, and one JSON line."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import windowpane
from windowpane.engine.progress import busy
from windowpane.engine.start import start
from windowpane.measure.machine import cpu_name
from windowpane.measure.rounds import CountingRunner, Timing, roof_bytes_per_second, run_round, warm_up
from windowpane.measure.workloads import Workload

if TYPE_CHECKING:
    from windowpane.engine.start import Started

GB = 1e9


def start_bench(model: str | None, workload: Workload, flags: Mapping[str, Any]) -> Started:
    """An engine that can run the workload; ValueError says why there is none. The plan goes to stderr."""
    started = start(model, flags, Console(stderr=True))
    if workload.longest > started.engine.scheduler.room(0):
        raise ValueError(
            f"{workload.name} has sequences of {workload.longest} tokens and --max-model-len is "
            f"{started.plan.max_model_len}; shorten --input-len or --output-len"
        )
    return started


def run_bench(started: Started, workload: Workload, temperature: float, seed: int) -> None:
    """Run the workload and print how it went; progress goes to stderr."""
    told = Console(stderr=True)
    with busy(told, "measuring the roof and warming up"):
        roof = roof_bytes_per_second(started.runner.device)
        warm_up(started.engine, started.spec.vocab_size)
    started.engine.runner = CountingRunner(started)
    rounds = workload.rounds(started.spec.vocab_size, seed, temperature)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, TimeElapsedColumn(), console=told, transient=True, disable=not told.is_terminal) as bar:
        task = bar.add_task(workload.name, total=sum(r.params.max_tokens for requests in rounds for r in requests))
        timings = [run_round(started.engine, requests, lambda n: bar.advance(task, n)) for requests in rounds]
    results = figures(started, workload, timings, roof)
    print_figures(Console(highlight=False), results)


def figures(started: Started, workload: Workload, timings: list[Timing], roof: float) -> dict[str, Any]:
    """All rounds in one document; rates are over their whole time, prefill included."""
    seconds = sum(t.seconds for t in timings)
    read_rate = sum(t.read_bytes for t in timings) / seconds
    first = [s for t in timings for s in t.first_token]
    between = [s for t in timings for s in t.between_tokens]
    output_tokens = sum(t.output_tokens for t in timings)
    drafts = started.engine.speculator.stats if started.engine.speculator is not None else None
    return {
        "workload": workload.name,
        "model": started.spec.name,
        "requests": workload.requests,
        "input_tokens": sum(t.input_tokens for t in timings),
        "output_tokens": output_tokens,
        "seconds": round(seconds, 4),
        "round_seconds": [round(t.seconds, 4) for t in timings],
        "output_tokens_per_second": round(output_tokens / seconds, 3),
        "decode_tokens_per_second": round(_decode_rate(between), 3) if workload.requests == 1 and between else None,
        "ttft_ms": _spread_ms(first),
        "itl_ms": _spread_ms(between),
        "read_gb_per_second": round(read_rate / GB, 3),
        "roof_gb_per_second": round(roof / GB, 3),
        "roof_share": round(read_rate / roof, 4),
        "drafted_tokens": drafts.draft_tokens if drafts else None,
        "accepted_tokens": drafts.accepted_tokens if drafts else None,
        "preemptions": started.engine.scheduler.preemptions,
        "max_model_len": started.plan.max_model_len,
        "kv_cache_bytes": started.plan.kv_bytes,
        "dtype": started.plan.sizing.compute_dtype,
        "tensor_parallel_size": started.plan.sizing.ranks,
        "device": device_name(started.runner.device),
        "threads": torch.get_num_threads() if started.runner.device.type == "cpu" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "windowpane": windowpane.__version__,
    }


def print_figures(console: Console, results: dict[str, Any]) -> None:
    rounds = ", then ".join(f"{s:.2f} s" for s in results["round_seconds"])
    rows = [
        (
            "requests",
            f"{results['requests']} ({results['input_tokens']:,} tokens in, {results['output_tokens']:,} out)",
        ),
        ("time", rounds),
        ("output", f"{results['output_tokens_per_second']:,.1f} tok/s"),
        ("TTFT", _spread_text(results["ttft_ms"])),
        ("ITL", _spread_text(results["itl_ms"])),
        (
            "reads",
            f"{results['read_gb_per_second']:.2f} GB/s, {results['roof_share']:.0%} of the roof "
            f"({results['roof_gb_per_second']:.1f} GB/s measured)",
        ),
    ]
    if results["decode_tokens_per_second"]:
        rows.insert(3, ("decoding", f"{results['decode_tokens_per_second']:,.1f} tok/s after the first token"))
    if results["drafted_tokens"] is not None:
        rows.append(("drafts", f"{results['accepted_tokens']:,} of {results['drafted_tokens']:,} accepted"))
    ranks = "" if results["tensor_parallel_size"] == 1 else f", {results['tensor_parallel_size']} ranks"
    console.print(f"{results['workload']}: {results['model']}, {results['dtype']}{ranks}", style="bold")
    for name, value in rows:
        console.print(f"  {name:<10}{value}", soft_wrap=True)
    machine = f"{results['device']}, Python {results['python']}, torch {results['torch']}"
    console.print(f"  {machine}, windowpane {results['windowpane']}", style="dim", soft_wrap=True)
    print(json.dumps(results), flush=True)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()} × {os.cpu_count()}"


def _decode_rate(between: list[float]) -> float:
    return len(between) / sum(between)


def _spread_ms(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    middle, late = np.percentile(seconds, [50, 99]) * 1e3
    return {"median": round(float(middle), 3), "p99": round(float(late), 3)}


def _spread_text(spread: dict[str, float] | None) -> str:
    return "–" if spread is None else f"{spread['median']:,.1f} ms median, {spread['p99']:,.1f} ms p99"
