"""What routing by restore points is worth on a real Ray, and what Ray costs: `python -m bench.cluster`.

*Chats*: 30 chats with a shared system prompt take turns, six at a time and in another order each time, on three
replicas of a small model with random weights: routed by restore points, in rotation, by Ray's own
`PrefixCacheAffinityRouter`, and on one replica alone with the memory of all three. Every prompt counts, the first
ones too. *Streaming*: processor time per token of the server and of the replica, for the same streams of one replica
behind Ray and of a plain server; a thread each. Only ratios within a run count, and because a machine's speed changes,
whatever is compared by time runs twice, early and late.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray import serve
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from rich.console import Console
from rich.table import Table

from bench.machine import machine_line
from tests.server.harness import Running, running, serving
from tests.tiny_model import make_model
from windowpane.cluster.published import LATEST
from windowpane.cluster.serve import ROUTER, connect, deploy, remote_service, shut_down
from windowpane.server.run import ServerOptions

REPLICAS, CHATS, TURNS, AT_ONCE = 3, 30, 6, 6
KV_BYTES = 64 * 2**20
FLAGS: dict[str, Any] = {
    "device": "cpu", "load_format": "dummy", "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 8192,
    "seed": 0,
}  # fmt: skip
SYSTEM = {"role": "system", "content": "You answer briefly and to the point. " * 20}
NO_END = {"257": -100}  # the model's stop token
ROUTERS = {
    "in rotation": "bench.cluster.Rotation", "Ray's prefix affinity": "bench.cluster.Affinity",
    "by restore points": ROUTER,
}  # fmt: skip


class Rotation(RequestRouter):
    """One after another, whatever they hold."""

    turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        self.turn += 1
        in_order = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        return [[in_order[self.turn % len(in_order)]]]


class Affinity(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's, which knows the beginnings of texts: each token is a character to it."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        return "".join(chr(0x10000 + token) for token in pending_request.args[0].prompt.tolist())


@contextmanager
def cluster(model: Path, router: str, application: str, replicas: int = REPLICAS) -> Iterator[Running]:
    """Replicas that know nothing yet. Ray keeps handles, and a handle its router, so each has its own application."""
    flags, options = {**FLAGS, "kv_cache_memory_bytes": KV_BYTES}, ServerOptions(served_model_names=("tiny",))
    handle, facts = deploy(str(model), flags, replicas, router=router, application=application)
    with serving(remote_service(str(model), flags, options, handle, facts), options) as server:
        yield server
    serve.delete(application)


def chats(server: Running) -> dict[str, float]:
    """The share of prompt tokens that was found, and the mean time to first token."""
    ttft_s: list[float] = []
    found = asked = 0
    shuffled = random.Random(0)

    def say(messages: list[dict[str, str]]) -> tuple[float, int, int]:
        began, first, usage = time.perf_counter(), None, None
        for piece in server.openai.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True},
            temperature=0, logit_bias=NO_END,
        ):  # fmt: skip
            if first is None and any(choice.delta.content for choice in piece.choices):
                first = time.perf_counter()
            usage = piece.usage or usage
        assert first is not None and usage is not None
        return first - began, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

    talks = [[SYSTEM, {"role": "user", "content": f"chat {n}: " + "tell me more. " * 80}] for n in range(CHATS)]
    say([SYSTEM])  # imports and the like
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for turn in range(TURNS):
            shuffled.shuffle(talks)  # in one order, a rotation over 3 would find every chat again
            for messages, (seconds, prompt, cached) in zip(talks, pool.map(say, talks), strict=True):
                ttft_s.append(seconds)
                asked, found = asked + prompt, found + cached
                messages += [
                    {"role": "assistant", "content": "more"},
                    {"role": "user", "content": f"turn {turn}. " * 8},
                ]
    return {"reused": found / asked, "ttft_ms": 1e3 * statistics.mean(ttft_s)}


def streaming_cpu_us(server: Running, pids: list[int], streams: int = 4, tokens: int = 400) -> float:
    """Processor time per token of this process and `pids`, by /proc: the median of three."""

    def stream(number: int) -> int:
        made = server.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": f"stream {number}"}], max_tokens=tokens, stream=True,
            logit_bias=NO_END,
        )  # fmt: skip
        return sum(1 for _ in made)

    stream(0)
    spent = []
    with ThreadPoolExecutor(streams) as pool:
        for _ in range(3):
            before = sum(map(_cpu_s, [os.getpid(), *pids]))
            list(pool.map(stream, range(streams)))
            spent.append(sum(map(_cpu_s, [os.getpid(), *pids])) - before)
    return 1e6 * statistics.median(spent) / (streams * tokens)


def through_ray(model: Path, application: str) -> float:
    with cluster(model, ROUTER, application, replicas=1) as server:
        server.wait_until(lambda: LATEST["Replica"], "the replica has published")
        return streaming_cpu_us(server, [stats["process_id"] for stats in LATEST["Replica"].values()])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    torch.set_num_threads(1)  # as Ray has it in replicas
    logging.getLogger().setLevel(logging.WARNING)  # importing `ray.llm` turns on everybody's
    runs: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    streamed: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as place:
        tiny = make_model(Path(place) / "tiny", max_position_embeddings=8192)
        small = make_model(Path(place) / "small", max_position_embeddings=8192, hidden_size=256, intermediate_size=1024)
        plain = partial(running, tiny, flags={**FLAGS, "kv_cache_memory_bytes": KV_BYTES})
        with plain() as one:
            streamed["plain"].append(streaming_cpu_us(one, []))
        names = {"served_model_names": ("tiny",)}
        with running(small, flags={**FLAGS, "kv_cache_memory_bytes": REPLICAS * KV_BYTES}, **names) as one:
            runs["one replica, all the memory"].append(chats(one))
        connect(REPLICAS, None)
        try:
            streamed["through Ray"].append(through_ray(tiny, "streams-early"))
            for number, (name, router) in enumerate([*ROUTERS.items(), *reversed(ROUTERS.items())]):
                with cluster(small, router, f"chats-{number}") as server:
                    runs[name].append(chats(server))
            streamed["through Ray"].append(through_ray(tiny, "streams-late"))
        finally:
            shut_down(is_ours=True)
        with plain() as one:
            streamed["plain"].append(streaming_cpu_us(one, []))
    rows = {name: {key: statistics.mean(run[key] for run in of) for key in of[0]} for name, of in runs.items()}
    report(rows, {name: statistics.mean(of) for name, of in streamed.items()})


def report(rows: dict[str, dict[str, float]], streamed: dict[str, float]) -> None:
    table = Table(f"{CHATS} chats, {TURNS} turns, {REPLICAS} replicas", "reused", "TTFT, mean")
    for name, row in rows.items():
        table.add_row(name, f"{row['reused']:.1%}", f"{row['ttft_ms']:.1f} ms")
    one, rotation, ours = rows["one replica, all the memory"], rows["in rotation"], rows["by restore points"]
    affinity = rows["Ray's prefix affinity"]
    cost_us = streamed["through Ray"] - streamed["plain"]
    targets = Table("", "", "target")
    targets.add_row("reused, of one replica's", f"{ours['reused'] / one['reused']:.3f}", "≥ 0.95")
    targets.add_row("TTFT in rotation, over ours", f"{rotation['ttft_ms'] / ours['ttft_ms']:.2f}", "≥ 1.5")
    targets.add_row("TTFT by prefix affinity, over ours", f"{affinity['ttft_ms'] / ours['ttft_ms']:.2f}", "≥ 1")
    targets.add_row(
        f"processor time a streamed token ({streamed['plain']:.0f} µs without Ray)", f"+{cost_us:.0f} µs", "≤ 300 µs"
    )
    Console().print(machine_line(), table, targets)
    print(json.dumps({"chats": rows, "streamed_cpu_us_per_token": streamed}))


if __name__ == "__main__":
    main()
