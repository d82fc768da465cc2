"""What routing by restore points is worth on a real Ray, and what Ray costs: `python -m bench.cluster`.

*Chats*: 30 chats with a shared system prompt take turns on three replicas of a small model with random weights, routed
by restore points, in rotation, and on one replica alone with the memory of all three. *Streaming*: processor time per
token of all processes, through Ray and from a plain server, for the same streams. Only ratios within a run count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from rich.console import Console
from rich.table import Table

from bench.machine import machine_line
from tests.server.harness import Running, running, serving
from tests.tiny_model import make_model
from windowpane.cluster.serve import ROUTER, connect, deploy, remote_service, shut_down
from windowpane.server.run import ServerOptions

REPLICAS, CHATS, TURNS = 3, 30, 4
KV_BYTES = 64 * 2**20
FLAGS: dict[str, Any] = {
    "device": "cpu", "load_format": "dummy", "max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 8192,
    "seed": 0,
}  # fmt: skip
SYSTEM = {"role": "system", "content": "You answer briefly and to the point. " * 20}
NO_END = {"257": -100}  # the model's stop token


class Rotation(RequestRouter):
    """One after another, whatever they hold."""

    turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        self.turn += 1
        return [[candidate_replicas[self.turn % len(candidate_replicas)]]]


@contextmanager
def cluster(model: Path, router: str) -> Iterator[Running]:
    flags, options = {**FLAGS, "kv_cache_memory_bytes": KV_BYTES}, ServerOptions()
    connect(REPLICAS, None)
    try:
        handle, facts = deploy(str(model), flags, REPLICAS, router=router)
        with serving(remote_service(str(model), flags, options, handle, facts), options) as server:
            yield server
    finally:
        shut_down(is_ours=True)


def chats(server: Running) -> dict[str, float]:
    """Turn by turn, six at a time: the share of later prompts that was found, and time to first token."""
    ttft_s: list[float] = []
    found = asked = 0

    def say(messages: list[dict[str, str]]) -> tuple[float, int, int]:
        began, first, usage = time.perf_counter(), None, None
        for piece in server.openai.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True},
            temperature=0, logit_bias=NO_END,
        ):  # fmt: skip
            first = first or time.perf_counter()
            usage = piece.usage or usage
        assert first is not None and usage is not None
        return first - began, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

    talks = [[SYSTEM, {"role": "user", "content": f"chat {n}: " + "tell me more. " * 80}] for n in range(CHATS)]
    with ThreadPoolExecutor(6) as pool:
        for turn in range(TURNS):
            for messages, (seconds, prompt, cached) in zip(talks, pool.map(say, talks), strict=True):
                if turn:
                    ttft_s.append(seconds)
                    asked, found = asked + prompt, found + cached
                messages += [
                    {"role": "assistant", "content": "more"},
                    {"role": "user", "content": f"turn {turn}. " * 8},
                ]
    return {"reused": found / asked, "ttft_ms": 1e3 * statistics.mean(ttft_s)}


def streaming_cpu_us(server: Running, pids: list[int], streams: int = 4, tokens: int = 400) -> float:
    """Processor time per token of this process and `pids`, by /proc."""

    def stream(number: int) -> int:
        made = server.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": f"stream {number}"}], max_tokens=tokens, stream=True,
            logit_bias=NO_END,
        )  # fmt: skip
        return sum(1 for _ in made)

    stream(0)
    before = sum(map(_cpu_s, [os.getpid(), *pids]))
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(stream, range(streams)))
    return 1e6 * (sum(map(_cpu_s, [os.getpid(), *pids])) - before) / (streams * tokens)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    from windowpane.cluster.published import LATEST

    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as place:
        model = make_model(Path(place) / "tiny", max_position_embeddings=8192)
        with running(model, flags={**FLAGS, "kv_cache_memory_bytes": REPLICAS * KV_BYTES}) as one:
            rows["one replica"] = {**chats(one), "cpu_us_per_token": streaming_cpu_us(one, [])}
        with cluster(model, "bench.cluster.Rotation") as server:
            rows["rotation"] = chats(server)
        with cluster(model, ROUTER) as server:
            rows["restore points"] = chats(server)
            pids = [stats["process_id"] for stats in LATEST.values()]
            rows["restore points"]["cpu_us_per_token"] = streaming_cpu_us(server, pids)
    table = Table("", "reused", "TTFT, mean", "processor time\na streamed token")
    for name, row in rows.items():
        cpu = f"{row['cpu_us_per_token']:.0f} µs" if "cpu_us_per_token" in row else ""
        table.add_row(name, f"{row['reused']:.1%}", f"{row['ttft_ms']:.1f} ms", cpu)
    console = Console()
    console.print(machine_line(), table)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
