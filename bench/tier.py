"""The host tier: copies of pages, the next turn of a long session, and sessions that take turns on a small arena.

    python3 -m bench.tier gpu [--model gemma-4-31b] [--part copies] [--part next] [--part sessions] [--host-gib 72]

`copies` moves the pages of sessions of the model's layout each way, and both at once. `next` asks the next turn of one
session of `--length` tokens three times: from the device, from the host, and computed again; beside it, four requests
decode. `sessions` has 24 sessions of 32,768 tokens taking turns of 64-token answers on an arena that holds 8 of them,
one at a time and eight at once, with and without the tier. Weights are random. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from windowpane.device.host_pages import HostPages
from windowpane.engine.engine import Engine
from windowpane.engine.start import Started, start
from windowpane.kv.arena import Arena, Cursor
from windowpane.kv.capacity import Capacity
from windowpane.kv.changes import Changes, PageTransfer
from windowpane.kv.layout import Layout
from windowpane.measure.rounds import warm_up
from windowpane.models import load
from windowpane.plan.config import EngineConfig
from windowpane.plan.planner import size_up
from windowpane.schedule.request import FinishReason, Request, SamplingParams

GIB = 2**30
ANSWER_TOKENS = 64
MORE_TOKENS = 32  # of a next turn
PARTS = ("copies", "next", "sessions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=["gpu"])
    parser.add_argument("--model", default="gemma-4-31b", help="a shipped shape or a directory")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--length", type=int, default=65_536, help="tokens of the session of `next`")
    parser.add_argument("--session-tokens", type=int, default=32_768)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--held", type=int, default=8, help="sessions that the arena holds")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each session with the tier")
    parser.add_argument("--computed-turns", type=int, default=8, help="turns that are measured without it")
    parser.add_argument("--host-gib", type=float, default=72)
    given = parser.parse_args()
    found: dict[str, Any] = {"model": given.model}
    for part in given.part or PARTS:
        found[part] = {"copies": copies, "next": next_turn, "sessions": sessions}[part](given)
        print(f"{part}: {json.dumps(found[part], indent=2)}", flush=True)
        gc.collect()
        if given.device != "cpu":
            torch.cuda.empty_cache()
    print(json.dumps(found), flush=True)


# -- copies --------------------------------------------------------------------------------------------------------


def copies(given: argparse.Namespace) -> dict[str, Any]:
    """GB/s of all pages of one session, as the tier would copy them: the best of five."""
    layout = size_up(load(given.model), EngineConfig(), 1, on_cpu=given.device == "cpu").layout
    slabs = 2 * Capacity(layout, 0).slabs_for(1, given.length)
    arena = torch.zeros(slabs * layout.slab_bytes, dtype=torch.uint8, device=given.device)
    host = HostPages(layout, slabs, arena)
    one, other = (_session_pages(layout, given.length, Arena(layout, slabs), times) for times in (1, 2))
    sizes = [len(offsets) * layout.groups[g].page_bytes for g, offsets in one]
    result: dict[str, Any] = {"session_bytes": sum(sizes)}
    number = 0
    for name, orders in {
        "to_host": [(one, True)],
        "to_device": [(one, False)],
        "both": [(one, True), (other, False)],
    }.items():
        seconds = []
        for _ in range(6):
            transfers = []
            for pages, to_host in orders:
                number += 1
                listed = tuple((g, offsets, offsets) for g, offsets in pages)
                transfers.append(PageTransfer(number, to_host, listed))
            began = time.perf_counter()
            host.wait(Changes())
            host.begin(tuple(transfers))
            issued = time.perf_counter() - began
            landed = 0
            while landed < len(transfers):
                landed += len(host.landed())
            seconds.append(time.perf_counter() - began)
        result[f"{name}_gb_per_s"] = round(len(orders) * sum(sizes) / min(seconds[1:]) / 1e9, 2)
        result[f"{name}_issue_ms"] = round(issued * 1e3, 2)
    return result


def _session_pages(layout: Layout, length: int, arena: Arena, times: int) -> list[tuple[int, Any]]:
    """Offsets of the pages of the last of so many sessions."""
    for _ in range(times):
        pages = [(g, arena.take(g, group.max_pages(length), Cursor())) for g, group in enumerate(layout.groups)]
    return pages


# -- the next turn of one session ----------------------------------------------------------------------------------


def next_turn(given: argparse.Namespace) -> dict[str, Any]:
    with _engine(given, given.length + 4 * (ANSWER_TOKENS + MORE_TOKENS), given.host_gib) as started:
        engine, rng = started.engine, np.random.default_rng(1)
        tier = engine.scheduler.tier
        assert tier is not None
        tokens = rng.integers(started.spec.vocab_size, size=given.length, dtype=np.int32)
        first, tokens = _turn(engine, rng, started, tokens, more=0)
        result: dict[str, Any] = {"tokens": given.length, "first_s": round(first, 3)}
        seconds: dict[str, list[float]] = {"device": [], "host": []}
        for _ in range(3):
            answered, _ = _turn(engine, rng, started, tokens)
            seconds["device"].append(answered)
        for _ in range(3):
            _spill_everything(engine)
            for point in engine.manager.restore_points:
                engine.manager.drop(point)
            answered, _ = _turn(engine, rng, started, tokens)
            seconds["host"].append(answered)
        result |= {f"{where}_s": round(statistics.median(times), 4) for where, times in seconds.items()}
        result["host_more_s"] = round(result["host_s"] - result["device_s"], 4)
        result |= _beside_decoding(started, rng, tokens)
        engine.scheduler.drop_restore_points()
        again, _ = _turn(engine, rng, started, tokens)
        stats = tier.stats
        gb_per_s = stats.fetched_bytes / stats.fetch_seconds / 1e9 if stats.fetch_seconds else None
        return result | {"computed_s": round(again, 3), "fetched_gb_per_s": gb_per_s and round(gb_per_s, 2)}


def _beside_decoding(started: Started, rng: np.random.Generator, tokens: Any) -> dict[str, Any]:
    """How long steps of four decoding requests take, alone and while a session is fetched."""
    engine = started.engine
    assert engine.scheduler.tier is not None
    _spill_everything(engine)
    for point in engine.manager.restore_points:
        engine.manager.drop(point)
    params = SamplingParams(max_tokens=160, temperature=0, ignore_eos=True)
    prompts = rng.integers(started.spec.vocab_size, size=(4, 64), dtype=np.int32)
    others = [Request(f"other {i}", p, params, cache_salt="others") for i, p in enumerate(prompts)]
    for other in others:
        engine.add(other)
    while len(others[0].output) < 16:
        engine.step()
    alone, fetching = [], []
    back = Request("back", np.append(tokens, np.int32(3)), SamplingParams(max_tokens=4, temperature=0))
    while engine.has_work:
        if len(others[0].output) >= 80 and back.arrival < 0:
            engine.add(back)
        began, before = time.perf_counter(), len(others[0].output)
        under_way = engine.scheduler.tier.in_transit and back.arrival >= 0 and not back.output
        engine.step()
        if len(others[0].output) > before and len(others[0].output) < 150:
            (fetching if under_way else alone).append(time.perf_counter() - began)
    ms = {"decode_step_ms": alone, "decode_step_while_fetching_ms": fetching}
    return {name: round(1e3 * statistics.median(times), 3) if times else None for name, times in ms.items()}


# -- sessions that take turns --------------------------------------------------------------------------------------


def sessions(given: argparse.Namespace) -> dict[str, Any]:
    turns = given.rounds + 1
    longest = given.session_tokens + 2 * (turns + 1) * (ANSWER_TOKENS + MORE_TOKENS)
    layout = size_up(load(given.model), EngineConfig(), 1, on_cpu=given.device == "cpu").layout
    arena_bytes = Capacity(layout, 0).slabs_for(given.held, longest + 256) * layout.slab_bytes
    result: dict[str, Any] = {
        "sessions": given.sessions,
        "tokens": given.session_tokens,
        "arena_gib": arena_bytes / GIB,
    }
    for host_gib in (given.host_gib, 0):
        result |= _session_rates(given, longest, host_gib, arena_bytes)
        gc.collect()  # engines have cycles, and the next one needs the room
        if given.device != "cpu":
            torch.cuda.empty_cache()
    for at_once in (1, given.held):
        rates = [result[f"{name}_{at_once}_at_once_turns_per_minute"] for name in ("with", "without")]
        result[f"{at_once}_at_once_times"] = round(rates[0] / rates[1], 2)
    return result


def _session_rates(given: argparse.Namespace, longest: int, host_gib: float, arena_bytes: int) -> dict[str, Any]:
    """With the tier all sessions are computed once before. Without it every turn of so many is computed again, so a
    first round would change nothing.
    """
    name, rng, result = "with" if host_gib else "without", np.random.default_rng(2), {}
    with _engine(given, longest, host_gib, kv_cache_memory_bytes=arena_bytes) as started:
        shape = (given.sessions, given.session_tokens)
        held = list(rng.integers(started.spec.vocab_size, size=shape, dtype=np.int32))
        count = given.sessions * given.rounds if host_gib else given.computed_turns
        if host_gib:
            began = time.perf_counter()
            _take_turns(started, rng, held, given.sessions, at_once=given.held, more=0)
            result["first_round_s"] = round(time.perf_counter() - began, 1)
        for at_once in (1, given.held):
            rate = _take_turns(started, rng, held, count, at_once=at_once)
            result[f"{name}_{at_once}_at_once_turns_per_minute"] = round(rate, 2)
            print(f"  {name}, {at_once} at once: {rate:.2f} turns per minute", flush=True)
        if (tier := started.engine.scheduler.tier) is not None:
            stats = tier.stats
            result |= {
                "fetches": stats.fetches,
                "fetched_gib": round(stats.fetched_bytes / GIB, 2),
                "spilled_gib": round(stats.spilled_bytes / GIB, 2),
                "fetch_gb_per_s": round(stats.fetched_bytes / max(stats.fetch_seconds, 1e-9) / 1e9, 2),
                "host_used_gib": round(stats.cached_bytes / GIB, 2),
                "host_evictions": stats.evictions,
            }
    return result


def _take_turns(
    started: Started, rng: np.random.Generator, held: list[Any], count: int, *, at_once: int, more: int = MORE_TOKENS
) -> float:
    """So many turns, session after session, `at_once` of them running; turns per minute. `held` grows by each."""
    engine, vocab_size = started.engine, started.spec.vocab_size
    waiting = [index % len(held) for index in range(count)]
    running: dict[Request, int] = {}
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < at_once and waiting[0] not in running.values():
            index = waiting.pop(0)
            prompt = np.append(held[index], rng.integers(vocab_size, size=more, dtype=np.int32))
            request = Request(f"turn {count - len(waiting)}", prompt, params)
            engine.add(request)
            running[request] = index
        for output in engine.step():
            _check(output.request)
            if output.request.finish_reason is not None and output.request in running:
                held[running.pop(output.request)] = output.request.tokens(0, output.request.known_tokens).copy()
    return 60 * count / (time.perf_counter() - began)


# -- engines -------------------------------------------------------------------------------------------------------


@contextmanager
def _engine(given: argparse.Namespace, longest: int, host_gib: float, **flags: Any) -> Iterator[Started]:
    flags |= {"load_format": "dummy", "device": given.device, "max_model_len": longest, "max_num_seqs": 16}
    began = time.perf_counter()
    started = start(given.model, {**flags, "kv_offloading_size": host_gib})
    warm_up(started.engine, started.spec.vocab_size)
    print(f"{given.model}, host tier of {host_gib} GiB: started in {time.perf_counter() - began:.1f} s", flush=True)
    try:
        yield started
    finally:
        started.close()


def _turn(
    engine: Engine, rng: np.random.Generator, started: Started, tokens: Any, more: int = MORE_TOKENS
) -> tuple[float, Any]:
    """Seconds to the first token of one more turn, and the session with it."""
    prompt = np.append(tokens, rng.integers(started.spec.vocab_size, size=more, dtype=np.int32))
    request = Request("turn", prompt, SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True))
    began = time.perf_counter()
    engine.add(request)
    first = 0.0
    while engine.has_work:
        for output in engine.step():
            _check(output.request)
            first = first or time.perf_counter() - began
    return first, request.tokens(0, request.known_tokens).copy()


def _spill_everything(engine: Engine) -> None:
    tier = engine.scheduler.tier
    assert tier is not None
    for point in engine.manager.restore_points:
        tier.spill(point)
    while engine.has_work:
        engine.step()


def _check(request: Request) -> None:
    if request.finish_reason is FinishReason.FAILED:
        raise RuntimeError(f"a step failed: {request.error}") from request.error


if __name__ == "__main__":
    main()
