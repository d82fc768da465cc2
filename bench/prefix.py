"""What restore points find and what they cost: `python -m bench.prefix`.

*Round robin*: sessions of 8,192 tokens ask in turn, three rounds, in the memory of 5,000 vLLM blocks of 2.5 MiB, on the
layouts of Gemma 4 31B (windows) and Qwen3.5 27B (recurrent states). The hit rate counts prompt tokens; 2/3 is the most
there is. *Lookup* is that of a prompt of 131,072 tokens among many others. *Insertion* is what keeping restore points
adds to a step that computes a prompt. Only the scheduler and the manager run: no model is loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import machine_line
from windowpane.kv.layout import Layout, group_caches, plan_layout, resolve_formats
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.models import load
from windowpane.schedule.request import Request, SamplingParams
from windowpane.schedule.restoring import RestorePlanner
from windowpane.schedule.scheduler import Scheduler

KV_BYTES = 5_000 * 5 * 2**19  # 5,000 blocks of 2.5 MiB
SESSION_TOKENS, ROUNDS, ANSWER_TOKENS = 8_192, 3, 16
LONG_TOKENS = 131_072
# The least that a step of so many tokens takes on one H200: reading all weights (61 GB of Gemma's), or 2 FLOP per
# weight and token at 989 TFLOP/s.
STEP_MS = {"gemma-4-31b": {256: 17.0, 8_192: 509.0}, "qwen3.5-27b": {256: 14.0, 8_192: 446.0}}
# vLLM 0.26.0 with Gemma 4 31B on the same memory: everything up to 4 sessions, nothing from 6 on.
VLLM_ALL_UP_TO, VLLM_NOTHING_FROM = 4, 6


def layout_of(model: str) -> Layout:
    caches = list(load(model).caches)
    return plan_layout(caches, resolve_formats("auto", group_caches(caches), "bfloat16"))


def scheduler_for(layout: Layout, kv_bytes: int, *, keep: bool = True, slots: int = 8) -> Scheduler:
    manager = KVManager(layout, kv_bytes // layout.slab_bytes, slots, LONG_TOKENS + 64)
    return Scheduler(manager, SESSION_TOKENS, restore_points=RestorePoints(manager) if keep else None)


def ask(scheduler: Scheduler, prompt: np.ndarray, max_tokens: int) -> Request:
    request = Request("r", prompt, SamplingParams(max_tokens))
    scheduler.add(request)
    while scheduler.has_work:
        step(scheduler)
    return request


def step(scheduler: Scheduler) -> None:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.commit(np.full(len(batch.decode_slots) + sum(c.samples for c in batch.chunks), 7))


def hit_rate(layout: Layout, sessions: int) -> float:
    """Share of prompt tokens that were found, over all rounds."""
    scheduler = scheduler_for(layout, KV_BYTES)
    prompts = [prompt_tokens(seed, SESSION_TOKENS) for seed in range(sessions)]
    found = sum(ask(scheduler, p, ANSWER_TOKENS).cached_tokens for _ in range(ROUNDS) for p in prompts)
    return found / (ROUNDS * sessions * SESSION_TOKENS)


def prompt_tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 262_144, count, dtype=np.int32)


def lookup_ms(layout: Layout, repeats: int = 50) -> float:
    """A warm lookup of a 131,072-token prefix that 200 other prompts share in part."""
    scheduler = scheduler_for(layout, 64 * 2**30)
    assert isinstance(scheduler.restoring, RestorePlanner)
    whole = prompt_tokens(0, LONG_TOKENS)
    ask(scheduler, whole, 1)
    for seed in range(1, 200):
        ask(scheduler, np.concatenate([whole[: 16 * seed], prompt_tokens(seed, 64)]), 1)
    question = np.concatenate([whole, prompt_tokens(7, 10)])
    key = Request("r", question, SamplingParams(1)).prefix_key
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        hit = scheduler.restoring.points.look_up(key, question, may_skip_last=True)
        times.append(time.perf_counter() - start)
        assert hit.length == LONG_TOKENS
    return 1e3 * statistics.median(times)


def prompt_step_ms(layout: Layout, tokens: int, *, keep: bool, prompts: int = 200) -> float:
    """Milliseconds of `schedule` and `commit` for the first step of a prompt, memory full of restore points.

    Two of its messages end inside the prompt, so that a step leaves three restore points there.
    """
    scheduler = scheduler_for(layout, KV_BYTES, keep=keep)
    times = []
    for seed in range(prompts):
        ends = (tokens // 4, tokens // 2)
        request = Request("r", prompt_tokens(seed, tokens), SamplingParams(2), message_ends=ends)
        scheduler.add(request)
        start = time.perf_counter()
        step(scheduler)
        times.append(time.perf_counter() - start)
        while scheduler.has_work:
            step(scheduler)
    return 1e3 * statistics.median(times[prompts // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=20, help="most sessions in the round robin")
    most, console = parser.parse_args().sessions, Console()
    layouts = {model: layout_of(model) for model in STEP_MS}
    rates = {model: hit_rates(layout, most) for model, layout in layouts.items()}
    console.print(round_robin(rates))
    found = {model: measured(model, layout, rates[model], console) for model, layout in layouts.items()}
    print(json.dumps({"bench": "prefix", "models": found}))


def hit_rates(layout: Layout, most: int) -> dict[int, float]:
    return {count: hit_rate(layout, count) for count in range(1, most + 1)}


def round_robin(rates: dict[str, dict[int, float]]) -> Table:
    table = Table(title=f"round robin, hit rate in tokens\n{machine_line()}", title_justify="left")
    gemma, *others = rates
    for column in ("sessions", gemma, "the same in vLLM 0.26.0", *others):
        table.add_column(column, justify="right")
    for count, rate in rates[gemma].items():
        vllm = "0.667" if count <= VLLM_ALL_UP_TO else "0" if count >= VLLM_NOTHING_FROM else ""
        table.add_row(str(count), f"{rate:.3f}", vllm, *(f"{rates[other][count]:.3f}" for other in others))
    return table


def measured(model: str, layout: Layout, rates: dict[int, float], console: Console) -> dict[str, Any]:
    """Everything about one model, told and by name."""
    up_to = next((count - 1 for count, rate in rates.items() if rate < 0.66), max(rates))
    lookup = lookup_ms(layout)
    console.print(f"{model}: 0.66 or more up to {up_to} sessions")
    console.print(f"lookup of a {LONG_TOKENS:,}-token prefix: {lookup:.2f} ms")
    shares = {}
    for tokens, step_ms in STEP_MS[model].items():
        without, with_points = (prompt_step_ms(layout, tokens, keep=keep) for keep in (False, True))
        shares[tokens] = (with_points - without) / step_ms
        console.print(
            f"a {tokens:,}-token prompt is scheduled in {without:.2f} ms, with restore points in {with_points:.2f} ms: "
            f"{shares[tokens]:.1%} of a step of at least {step_ms:g} ms"
        )
    return {
        "sessions_at_0_66": up_to,
        "hit_rates": rates,
        "lookup_131072_ms": lookup,
        "insertion_share_of_step": shares,
    }


if __name__ == "__main__":
    main()
