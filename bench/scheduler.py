"""What a scheduling step costs on one CPU core: `python -m bench.scheduler`.

256 requests decode after prompts of about 1,024 tokens, their page boundaries spread over steps as in service. A *step*
is schedule + commit. "Between boundaries" is the median of steps in which no sequence needs a page, measured with all
prompts equally long. Windows up to the prompt's length are full rings and cost nothing; the last row has windows far
beyond it, so that every group of every sequence takes a page every 16 tokens. In a step with drafts each request has
four, of which any number is accepted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import machine_line
from windowpane.kv.caches import Cache, TokenCache
from windowpane.kv.capacity import Capacity
from windowpane.kv.layout import Layout, group_caches, plan_layout, resolve_formats, rollback_for
from windowpane.kv.manager import KVManager
from windowpane.kv.retention import Window
from windowpane.models import load
from windowpane.schedule.request import Request, SamplingParams
from windowpane.schedule.scheduler import DEFAULT_GROWTH_TOKENS, Scheduler

REQUESTS, PROMPT_TOKENS, MAX_MODEL_LEN = 256, 1024, 131_072
DRAFTS = 4


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds and microseconds of one layout."""

    name: str
    groups: int
    step_ms: float
    steady_us_per_request: float
    p99_ms: float


def layout_of(caches: list[Cache]) -> Layout:
    return plan_layout(caches, resolve_formats("auto", group_caches(caches), "bfloat16"))


def windows(count: int, largest: int = 1024, layers: int = 46) -> list[Cache]:
    """`layers` layers over `count` distinct windows of up to `largest` tokens."""
    sizes = np.linspace(largest, largest // 8, count).astype(int).tolist()
    return [TokenCache(i, Window(sizes[i % count]), 8, 128, 128) for i in range(layers)]


def measure_steps(name: str, layout: Layout, steps: int) -> StepTimes:
    taken = [seconds for seconds, _ in step_times(layout, steps, spread_tokens=64)]
    steady = [seconds for seconds, took_pages in step_times(layout, steps, spread_tokens=1) if not took_pages]
    return StepTimes(
        name,
        len(layout.groups),
        1e3 * statistics.median(taken),
        1e6 * statistics.median(steady) / REQUESTS,
        1e3 * float(np.quantile(taken, 0.99)),
    )


def step_times(layout: Layout, steps: int, spread_tokens: int) -> list[tuple[float, bool]]:
    """(seconds, whether it handed out pages) of each decoding step."""
    scheduler = decoding_scheduler(layout, steps, spread_tokens)
    tokens = np.full(REQUESTS, 7)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduler.commit(tokens)
        elapsed = time.perf_counter() - start
        assert batch is not None and len(batch.decode_slots) == REQUESTS
        times.append((elapsed, bool(batch.changes.entries)))
    return times


def measure_drafts(layout: Layout, steps: int) -> float:
    """Milliseconds of a step with drafts."""
    scheduler, rng = decoding_scheduler(layout, steps * (1 + DRAFTS), 64, DRAFTS), np.random.default_rng(1)
    times = []
    for _ in range(steps):
        drafts = {slot: np.zeros(DRAFTS, dtype=np.int32) for slot in scheduler.decoding_slots.tolist()}
        start = time.perf_counter()
        batch = scheduler.schedule(drafts)
        elapsed = time.perf_counter() - start
        assert batch is not None
        counts = [1] * len(batch.decode_slots) + [int(rng.integers(1, 2 + (c.drafts or 0))) for c in batch.chunks]
        start = time.perf_counter()
        scheduler.commit(np.full(sum(counts), 7), counts if batch.chunks else None)
        times.append(elapsed + time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def decoding_scheduler(layout: Layout, steps: int, spread_tokens: int, drafts: int = 0) -> Scheduler:
    """A scheduler whose requests have all been prefilled, for so many more tokens of each."""
    rollback = rollback_for(drafts, layout)
    # Room for a half-open slab per sequence and group: this measures steps, not compaction.
    longest = PROMPT_TOKENS + steps + 2 * DEFAULT_GROWTH_TOKENS
    room = Capacity(layout, 0, rollback).slabs_for(REQUESTS, longest) + REQUESTS * len(layout.groups)
    # One step prefills all of them, so that only `spread_tokens` sets their page boundaries apart.
    manager = KVManager(layout, room, REQUESTS, MAX_MODEL_LEN, rollback)
    scheduler = Scheduler(manager, REQUESTS * PROMPT_TOKENS, draft_tokens=drafts)
    rng = np.random.default_rng(0)
    for i in range(REQUESTS):
        prompt = np.zeros(PROMPT_TOKENS - int(rng.integers(spread_tokens)), dtype=np.int32)
        scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=100_000, stop_token_ids=(1, 106))))
    while True:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.commit(np.full(len(batch.decode_slots) + sum(c.samples for c in batch.chunks), 7))
        if len(batch.decode_slots) == REQUESTS:
            return scheduler


def measure_prompt(layout: Layout, repeats: int = 20) -> float:
    """Milliseconds to give a 131,072-token prompt all its pages, in chunks of 8,192."""
    times = []
    for _ in range(repeats):
        manager = KVManager(layout, 2000, 1, MAX_MODEL_LEN)
        manager.start(0, MAX_MODEL_LEN)
        start = time.perf_counter()
        for length in range(8192, MAX_MODEL_LEN + 1, 8192):
            manager.extend(0, length)
            manager.take_changes()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    gemma = layout_of(list(load("gemma-4-31b").caches))
    rows = [
        measure_steps("gemma-4-31b", gemma, steps),
        measure_steps("1 window, 46 layers", layout_of(windows(1)), steps),
        measure_steps("6 windows", layout_of(windows(6)), steps),
        measure_steps("46 windows", layout_of(windows(46)), steps),
        measure_steps("46 windows, filling", layout_of(windows(46, largest=65_536)), steps // 10),
    ]
    prompt_ms, drafts_ms = measure_prompt(gemma), measure_drafts(gemma, steps // 20)
    table = Table(title=f"schedule + commit, {REQUESTS} decoding requests\n{machine_line()}", title_justify="left")
    for column in ("layout", "groups", "step (median)", "p99", "between boundaries"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.groups),
            f"{row.step_ms:.3f} ms",
            f"{row.p99_ms:.3f} ms",
            f"{row.steady_us_per_request:.2f} µs/request",
        )
    console = Console()
    console.print(table)
    one, six, many = (row.step_ms for row in rows[1:4])
    console.print(f"6 windows / 1: {six / one:.2f} ×   46 windows / 1: {many / one:.2f} ×")
    console.print(f"with {DRAFTS} drafts each: {drafts_ms:.2f} ms a step (gemma-4-31b)")
    console.print(f"131,072-token prompt extended in {prompt_ms:.2f} ms (gemma-4-31b, 8,192-token chunks)")
    print(
        json.dumps(
            {
                "bench": "scheduler",
                "step_ms": rows[0].step_ms,
                "drafts_step_ms": drafts_ms,
                "step_p99_ms": rows[0].p99_ms,
                "steady_us_per_request": rows[0].steady_us_per_request,
                "six_windows_ratio": six / one,
                "many_windows_ratio": many / one,
                "prompt_131072_ms": prompt_ms,
            }
        )
    )


if __name__ == "__main__":
    main()
