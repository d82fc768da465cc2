"""The tiers: copies of pages, the next turn of a long session, and sessions that take turns on a small arena.

    python3 -m bench.tier gpu [--model gemma-4-31b] [--part copies] [--part next] [--part sessions] [--host-gib 72]

`copies` moves the pages of sessions of the model's layout each way, and both at once. `next` asks the next turn of one
session of `--length` tokens three times: from the device, from the host, and computed again; then four requests decode
while it is fetched again and again. `sessions` has 24 sessions of 32,768 tokens taking turns of 64-token answers on an
arena that holds 8 of them, one at a time and eight at once, without the tier and with it: two engines over one runner,
so that the model is loaded once. Most of the time goes into computing all sessions once. Weights are random. The last
line is JSON.

    python -m bench.tier cpu [--model gemma-3-270m] [--length 4096]

A chat of so many tokens whose process is ended by `kill -9`: seconds from when a new one is ready to the first token of
its next turn, from disk and computed again.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from windowpane.device.host_pages import HostPages
from windowpane.engine.engine import Engine
from windowpane.engine.start import Started, start
from windowpane.kv.arena import Arena, Cursor
from windowpane.kv.capacity import Capacity
from windowpane.kv.changes import Changes, PageTransfer
from windowpane.kv.layout import Layout
from windowpane.kv.manager import KVManager
from windowpane.kv.restore import RestorePoints
from windowpane.measure.rounds import warm_up
from windowpane.models import load
from windowpane.plan.config import EngineConfig
from windowpane.plan.planner import size_up
from windowpane.schedule.request import FinishReason, Request, SamplingParams
from windowpane.schedule.scheduler import Scheduler

GIB = 2**30
ANSWER_TOKENS = 64
MORE_TOKENS = 32  # of a next turn
FETCHES = 6  # beside decoding
STEPS_BETWEEN = 12  # of decoding alone, before each of them
REPORT_S = 10.0  # between lines that say how far it is
PARTS = ("copies", "next", "sessions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=["gpu", "cpu", "chat"], help="chat is one process of cpu")
    parser.add_argument("--model", help="gpu: a shipped shape or a directory; cpu: a model with weights")
    parser.add_argument("--kv-disk-path", help="of chat")
    parser.add_argument("--more", type=int, default=0, help="of chat: tokens of its next turn")
    parser.add_argument("--load-format", default="auto", help="of cpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")
    parser.add_argument("--length", type=int, help="tokens of the session of `next` (65,536), or of cpu's chat (4,096)")
    parser.add_argument("--session-tokens", type=int, default=32_768)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--held", type=int, default=8, help="sessions that the arena holds")
    parser.add_argument("--turns", type=int, nargs=2, default=(16, 48), help="with the tier: one at a time, at once")
    parser.add_argument("--computed-turns", type=int, nargs=2, default=(3, 12), help="the same without it")
    parser.add_argument("--seconds", type=float, default=60, help="after which a measurement begins no further turn")
    parser.add_argument("--host-gib", type=float, default=64)
    given = parser.parse_args()
    given.model = given.model or ("gemma-4-31b" if given.where == "gpu" else "gemma-3-270m")
    given.length = given.length or (65_536 if given.where == "gpu" else 4096)
    if given.where != "gpu":
        (restart if given.where == "cpu" else chat)(given)
        return
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
    """How long steps of four decoding requests take, alone and while a session is fetched, again and again."""
    engine, tier = started.engine, started.engine.scheduler.tier
    assert tier is not None
    _spill_everything(engine)
    params = SamplingParams(max_tokens=128 * FETCHES, temperature=0, ignore_eos=True)
    prompts = rng.integers(started.spec.vocab_size, size=(4, 64), dtype=np.int32)
    others = [Request(f"other {i}", p, params, cache_salt="others") for i, p in enumerate(prompts)]
    for other in others:
        engine.add(other)
    while len(others[0].output) < 16:
        engine.step()
    alone, fetching = [], []
    for fetch in range(FETCHES):
        for point in engine.manager.restore_points:
            if not point.pending:
                engine.manager.drop(point)
        alone += [seconds for _ in range(STEPS_BETWEEN) if (seconds := _timed_step(engine, others[0]))]
        back = Request("back", np.append(tokens, np.int32(3 + fetch)), SamplingParams(max_tokens=1, temperature=0))
        engine.add(back)
        while back.finish_reason is None:
            under_way = tier.in_transit
            seconds = _timed_step(engine, others[0])
            if (under_way or tier.in_transit) and not back.output and seconds:
                fetching.append(seconds)
        for _ in range(4):  # of which some still have rows of the one that came back
            engine.step()
    for other in others:
        engine.cancel(other)
    while engine.has_work:
        engine.step()
    ms, ms_fetching = (1e3 * statistics.median(times) for times in (alone, fetching))
    return {
        "decode_step_ms": round(ms, 3),
        "decode_step_while_fetching_ms": round(ms_fetching, 3),
        "slowed_percent": round(100 * (ms_fetching / ms - 1), 1),
        "steps_while_fetching": len(fetching),
    }


def _timed_step(engine: Engine, other: Request) -> float:
    """Seconds of a step that gave `other` a token; 0 where it gave none."""
    began, before = time.perf_counter(), len(other.output)
    engine.step()
    return time.perf_counter() - began if len(other.output) > before else 0.0


# -- sessions that take turns --------------------------------------------------------------------------------------


def sessions(given: argparse.Namespace) -> dict[str, Any]:
    rounds = 1 + sum(-(-turns // given.sessions) for turns in given.turns)
    longest = given.session_tokens + rounds * (ANSWER_TOKENS + MORE_TOKENS)
    layout = size_up(load(given.model), EngineConfig(), 1, on_cpu=given.device == "cpu").layout
    arena_bytes = Capacity(layout, 0).slabs_for(given.held, longest + 256) * layout.slab_bytes
    result: dict[str, Any] = {
        "sessions": given.sessions,
        "tokens": given.session_tokens,
        "arena_gib": round(arena_bytes / GIB, 2),
    }
    began = time.perf_counter()
    with _engine(given, longest, given.host_gib, kv_cache_memory_bytes=arena_bytes) as started:
        rng = np.random.default_rng(2)
        shape = (given.sessions, given.session_tokens)
        held = list(rng.integers(started.spec.vocab_size, size=shape, dtype=np.int32))
        # Without the tier every turn is computed again, so a first round would change nothing.
        result |= _session_rates(given, _without_tier(started), list(held), "without", given.computed_turns)
        first = _take_turns(given, started.engine, held, given.sessions, given.held, "with, first round", more=0)
        result["with_first_round_turns_per_minute"] = round(first, 2)
        result |= _session_rates(given, started.engine, held, "with", given.turns)
        tier = started.engine.scheduler.tier
        assert tier is not None
        stats = tier.stats
        result |= {
            "fetches": stats.fetches,
            "fetched_gib": round(stats.fetched_bytes / GIB, 2),
            "spilled_gib": round(stats.spilled_bytes / GIB, 2),
            "fetch_gb_per_s": round(stats.fetched_bytes / max(stats.fetch_seconds, 1e-9) / 1e9, 2),
            "host_used_gib": round(stats.cached_bytes / GIB, 2),
            "host_evictions": stats.evictions,
        }
    for at_once in (1, given.held):
        rates = [result[f"{name}_{at_once}_at_once_turns_per_minute"] for name in ("with", "without")]
        result[f"{at_once}_at_once_times"] = round(rates[0] / rates[1], 2)
    return result | {"seconds": round(time.perf_counter() - began, 1)}


def _without_tier(started: Started) -> Engine:
    """Another engine over the same runner, arena and weights, for as long as the one with the tier is idle."""
    engine = started.engine
    same, scheduler = engine.manager, engine.scheduler
    scheduler.drop_restore_points()  # whose pages the other engine is going to overwrite
    manager = KVManager(
        same.layout, same.arena.num_slabs, same.num_slots, same.max_model_len, rollback_tokens=same.rollback_tokens
    )
    plain = Scheduler(manager, scheduler.max_num_batched_tokens, restore_points=RestorePoints(manager))
    return Engine(plain, engine.runner, engine.sampler, async_scheduling=engine.async_scheduling)


def _session_rates(
    given: argparse.Namespace, engine: Engine, held: list[Any], name: str, turns: Sequence[int]
) -> dict[str, Any]:
    """Turns per minute, one at a time and as many at once as the arena holds."""
    result = {}
    for at_once, count in zip((1, given.held), turns, strict=True):
        if engine.scheduler.tier is None:  # few turns are measured, and none of them may find an earlier one's session
            engine.scheduler.drop_restore_points()
        rate = _take_turns(given, engine, held, count, at_once, f"{name}, {at_once} at once")
        result[f"{name}_{at_once}_at_once_turns_per_minute"] = round(rate, 2)
    return result


def _take_turns(
    given: argparse.Namespace,
    engine: Engine,
    held: list[Any],
    count: int,
    at_once: int,
    name: str,
    more: int = MORE_TOKENS,
) -> float:
    """So many turns, session after session, `at_once` of them running; turns per minute. `held` grows by each.

    A first round (`more` 0) takes the time that it takes; others begin no turn when `--seconds` are over.
    """
    rng = np.random.default_rng(count)
    waiting = [index % len(held) for index in range(count)]
    running: dict[Request, int] = {}
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
    done, found, began, told = 0, 0, time.perf_counter(), 0.0
    while waiting or running:
        seconds = time.perf_counter() - began
        if more and seconds > given.seconds:
            waiting.clear()
        while waiting and len(running) < at_once and waiting[0] not in running.values():
            index = waiting.pop(0)
            prompt = np.append(held[index], rng.integers(held[0].max(), size=more, dtype=np.int32))
            request = Request(f"turn {count - len(waiting)}", prompt, params)
            engine.add(request)
            running[request] = index
        for output in engine.step():
            request = output.request
            _check(request)
            if request.finish_reason is not None and request in running:
                held[running.pop(request)] = request.tokens(0, request.known_tokens).copy()
                done, found = done + 1, found + request.cached_tokens
        if seconds > told + REPORT_S:
            told = seconds
            print(f"  {name}: {done} of {count} turns in {seconds:.0f} s", flush=True)
    rate = 60 * done / (time.perf_counter() - began)
    while engine.has_work:  # copies that nobody waits for
        engine.step()
    print(f"  {name}: {rate:.2f} turns per minute ({done} turns, {found:,} tokens of prompts found)", flush=True)
    return rate


# -- a chat after kill -9 ------------------------------------------------------------------------------------------


def restart(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as nothing:
        first = _process(given, kept, more=0)
        before = -1
        while (files := len(list(Path(kept).glob("*.kv")))) != before or not files:  # until nothing more is written
            before = files
            time.sleep(1.0)
        first.kill()
        found = {"model": given.model, "tokens": given.length}
        for name, path in (("disk_s", kept), ("computed_s", nothing)):
            process = _process(given, path, more=MORE_TOKENS)
            found[name] = process.told["first_token_s"]
            process.kill()
    found["times"] = round(found["computed_s"] / found["disk_s"], 1)
    print(json.dumps(found))


def chat(given: argparse.Namespace) -> None:
    """One process: a chat of random tokens, the same in all, and `--more` of its next turn; then it waits."""
    flags = {"device": "cpu", "load_format": given.load_format, "max_model_len": given.length + 256, "max_num_seqs": 4}
    started = start(given.model, {**flags, "kv_offloading_size": 2, "kv_disk_path": given.kv_disk_path})
    warm_up(started.engine, started.spec.vocab_size)
    rng = np.random.default_rng(3)
    tokens = rng.integers(started.spec.vocab_size, size=given.length, dtype=np.int32)
    seconds, _ = _turn(started.engine, rng, started, tokens, more=given.more)
    tier = started.engine.scheduler.tier
    assert tier is not None
    print(json.dumps({"first_token_s": round(seconds, 3), "disk_hit_tokens": tier.stats.disk_hit_tokens}), flush=True)
    time.sleep(3600)


class _Chat(NamedTuple):
    process: subprocess.Popen[str]
    told: dict[str, Any]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _process(given: argparse.Namespace, path: str, more: int) -> _Chat:
    command = [sys.executable, "-m", "bench.tier", "chat", "--model", given.model, "--length", str(given.length)]
    command += ["--kv-disk-path", path, "--load-format", given.load_format, "--more", str(more)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return _Chat(process, json.loads(process.stdout.readline()))


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
