"""A day of chat at 95 % load: how many bytes lie stranded? `python -m bench.churn --hours 24`.

Drives the real scheduler and manager with a fixed step time in place of a model. A new turn arrives whenever live bytes
fall below 95 % of the arena, so the arena is always almost full while sequences of all lengths come and go.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.machine import machine_line
from windowpane.kv.layout import Layout, group_caches, plan_layout, resolve_formats
from windowpane.kv.manager import KVManager
from windowpane.models import load
from windowpane.schedule.request import Request, SamplingParams
from windowpane.schedule.scheduler import Scheduler
from windowpane.simulate.workloads import Chat

LOAD = 0.95
STEP_SECONDS = 0.05
MAX_NUM_SEQS = 256
CASES = (
    ("gemma-4-31b", "auto", 64.74),
    ("gemma-4-31b", "int8_per_token_head", 64.74),
    ("gemma-4-e4b", "auto", 16.0),
    ("gpt-oss-20b", "auto", 16.0),
    ("qwen3-next-80b-a3b", "auto", 24.0),
)


@dataclass(frozen=True)
class Churn:
    """Shares of the arena, sampled once a simulated second after the arena first filled up."""

    steps: int
    finished: int
    preemptions: int
    moved_pages: int
    live_mean: float
    stranded_mean: float
    stranded_max: float


class Traffic:
    """Closes the loop: keeps the arena at its load."""

    def __init__(self, layout: Layout, kv_bytes: int, seed: int) -> None:
        workload = Chat()
        self.manager = KVManager(layout, kv_bytes // layout.slab_bytes, MAX_NUM_SEQS, workload.max_tokens)
        self.scheduler = Scheduler(self.manager, max_num_batched_tokens=8192)
        self.finished = 0
        self._turns = workload.turns(seed)
        self._sent = 0

    def step(self) -> None:
        while self._room():
            turn = next(self._turns)
            prompt = np.zeros(turn.prompt_tokens, dtype=np.int32)
            self.scheduler.add(Request(str(self._sent), prompt, SamplingParams(turn.output_tokens)))
            self._sent += 1
        batch = self.scheduler.schedule()
        if batch is not None:
            sampled = len(batch.decode_slots) + sum(c.samples for c in batch.chunks)
            self.finished += len(self.scheduler.commit(np.ones(sampled, dtype=np.int64)))

    def _room(self) -> bool:
        return not self.scheduler.waiting and self.live_share < LOAD and len(self.scheduler.running) < MAX_NUM_SEQS

    @property
    def live_share(self) -> float:
        groups = self.manager.layout.groups
        live = sum(pages * g.page_bytes for pages, g in zip(self.manager.live_pages, groups, strict=True))
        return live / self.manager.arena.total_bytes

    @property
    def stranded_share(self) -> float:
        arena = self.manager.arena
        return sum(arena.stranded_bytes(g) for g in range(len(arena.used_pages))) / arena.total_bytes


def churn(layout: Layout, kv_bytes: int, hours: float, seed: int = 0, progress: Progress | None = None) -> Churn:
    traffic = Traffic(layout, kv_bytes, seed)
    steps = int(hours * 3600 / STEP_SECONDS)
    task = progress.add_task(layout.groups[0].name, total=steps) if progress else None
    live, stranded = [], []
    full_at = None
    for step in range(steps):
        traffic.step()
        if full_at is None and traffic.live_share >= 0.9 * LOAD:
            full_at = step
        if full_at is not None and step % int(1 / STEP_SECONDS) == 0:
            live.append(traffic.live_share)
            stranded.append(traffic.stranded_share)
        if progress and task is not None and step % 1000 == 0:
            progress.update(task, completed=step)
    if not stranded:
        raise RuntimeError(f"the arena never filled up in {hours} simulated hours")
    return Churn(
        steps,
        traffic.finished,
        traffic.scheduler.preemptions,
        traffic.manager.moved_pages,
        float(np.mean(live)),
        float(np.mean(stranded)),
        float(np.max(stranded)),
    )


def layout_of(model: str, kv_cache_dtype: str) -> Layout:
    caches = list(load(model).caches)
    return plan_layout(caches, resolve_formats(kv_cache_dtype, group_caches(caches), "bfloat16"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="only this one of the built-in cases")
    args = parser.parse_args()
    cases = [case for case in CASES if args.model in (None, case[0])]
    if not cases:
        parser.error(f"no case {args.model!r}; there are {', '.join(sorted({case[0] for case in CASES}))}")
    table = Table(title=f"{args.hours:g} h of chat at {LOAD:.0%} load\n{machine_line()}", title_justify="left")
    for column in ("model", "KV", "finished", "live", "stranded", "worst", "preempted", "moved pages"):
        table.add_column(column, justify="left" if column == "model" else "right")
    results = {}
    with Progress(transient=True) as progress:
        for model, dtype, gib in cases:
            result = churn(layout_of(model, dtype), int(gib * 2**30), args.hours, args.seed, progress)
            name = model if dtype == "auto" else f"{model}, {dtype}"
            results[name] = result
            table.add_row(
                name,
                f"{gib:g} GiB",
                f"{result.finished:,}",
                f"{result.live_mean:.1%}",
                f"{result.stranded_mean:.2%}",
                f"{result.stranded_max:.2%}",
                f"{result.preemptions:,}",
                f"{result.moved_pages:,}",
            )
    Console().print(table)
    worst = max(r.stranded_max for r in results.values())
    print(json.dumps({"bench": "churn", "hours": args.hours, "stranded_max": worst}))


if __name__ == "__main__":
    main()
