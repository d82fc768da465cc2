"""What the server adds to the engine: many streams at once over HTTP, beside the same requests without a server.

Starts `windowpane serve` on a tiny random model in a process of its own, opens all streams at the same time, and
compares every text with that of its prompt alone. The overhead per token is the processor time of all that is not the
engine: the event loop's thread (HTTP, streams) and, in the engine's, text and delivery. What serving takes longer than
the bare engine in wall time is printed too; on two cores the clients' own work is part of that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import machine_line
from tests.tiny_model import make_model
from windowpane.engine.llm import LLM
from windowpane.schedule.request import Request, SamplingParams

PROMPTS = 32  # distinct ones; streams take them in turn
FLAGS = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": 256 * 2**20}
LAG = "windowpane:event_loop_lag_seconds"


@dataclass(frozen=True)
class Round:
    """One round of all streams. `first_s` are times to the first text."""

    seconds: float
    tokens: int
    wrong: int
    first_s: list[float]
    loop_cpu_s: float
    output_cpu_s: float


def prompt(index: int) -> str:
    return f"Prompt {index % PROMPTS}: " + "window " * (1 + index % PROMPTS)


# -- the engine alone ----------------------------------------------------------------------------------------------


def solo_texts(llm: LLM, tokens: int) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [llm.generate(prompt(i), params)[0].text for i in range(PROMPTS)]


def engine_seconds(llm: LLM, streams: int, tokens: int) -> float:
    """The same requests, tokens only: no text, no HTTP."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [np.array(llm.encode(prompt(i)), dtype=np.int32) for i in range(streams)]
    start = time.perf_counter()
    for i, ids in enumerate(prompts):
        llm.engine.add(Request(str(i), ids, params))
    while llm.engine.has_work:
        llm.engine.step()
    return time.perf_counter() - start


# -- the server ----------------------------------------------------------------------------------------------------


class Served:
    """A server process, and what it says of itself."""

    def __init__(self, model: Path) -> None:
        code = "import sys; from windowpane.cli.main import main; sys.exit(main())"
        flags = [part for name, value in FLAGS.items() for part in ("--" + name.replace("_", "-"), str(value))]
        # On the CPU, as the engine that it is compared with: on a card the made-up weights would be others.
        flags += ["--device", "cpu", "--load-format", "dummy", "--max-queue", "4096", "--log-level", "warning"]
        command = [sys.executable, "-c", code, "serve", str(model), "--port", "0", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise RuntimeError("the server did not start")
        self._wait()

    def _wait(self) -> None:
        for _ in range(100):
            try:
                urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError("the server is not healthy")

    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds of the event loop's thread, and those of the engine's that went into text and delivery."""
        fields = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        loop_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        found = re.search(r"^windowpane:output_cpu_seconds_total\S* (\S+)$", self.metrics(), re.MULTILINE)
        assert found is not None
        return loop_s, float(found[1])

    def metrics(self) -> str:
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as response:
            text: str = response.read().decode()
        return text

    def lag_counts(self) -> dict[float, float]:
        buckets = re.findall(rf'^{LAG}_bucket{{le="([^"]+)".*?}} (\S+)$', self.metrics(), re.MULTILINE)
        return {float(bound): float(count) for bound, count in buckets}

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=30)


async def stream(port: int, path: str, body: dict[str, Any], first_s: list[float]) -> list[str]:
    """The lines of one stream over a raw socket: a client that costs as little as it can, so that the server is what
    is measured.
    """
    data = json.dumps(body).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
    received = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in received.split(b"\r\n", 1)[0], received
    chunks = [await reader.read(65536)]
    first_s.append(time.perf_counter() - start)
    while chunk := await reader.read(65536):
        chunks.append(chunk)
    writer.close()
    return re.findall(r"^(?:data: )?\{.*\}$", b"".join(chunks).decode(), re.MULTILINE)


async def run_round(served: Served, streams: int, tokens: int, solo: list[str]) -> Round:
    bodies = [
        {"prompt": prompt(i), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        for i in range(streams)
    ]
    first_s: list[float] = []
    loop_before, output_before = served.cpu_s()
    start = time.perf_counter()
    streams_lines = await asyncio.gather(*(stream(served.port, "/v1/completions", body, first_s) for body in bodies))
    seconds = time.perf_counter() - start
    loop_after, output_after = served.cpu_s()
    events = ([json.loads(line.removeprefix("data: ")) for line in lines] for lines in streams_lines)
    texts = ["".join(event["choices"][0]["text"] for event in of_one) for of_one in events]
    wrong = sum(text != solo[i % PROMPTS] for i, text in enumerate(texts))
    return Round(seconds, streams * tokens, wrong, first_s, loop_after - loop_before, output_after - output_before)


def percentile_bound(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """The upper bound of the bucket that this share of observations does not exceed."""
    counts = {bound: after[bound] - before[bound] for bound in after}
    total = counts[float("inf")]
    return min(bound for bound, count in counts.items() if count >= share * total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "tiny")
        llm = LLM(model, load_format="dummy", device="cpu", **FLAGS)
        solo = solo_texts(llm, args.tokens)
        engine_seconds(llm, args.streams, args.tokens)  # warms up
        alone = [engine_seconds(llm, args.streams, args.tokens) for _ in range(args.rounds)]
        served = Served(model)
        try:
            asyncio.run(run_round(served, min(args.streams, 100), args.tokens, solo))  # warms up
            before = served.lag_counts()
            rounds = [asyncio.run(run_round(served, args.streams, args.tokens, solo)) for _ in range(args.rounds)]
            lag_s = percentile_bound(before, served.lag_counts(), 0.99)
        finally:
            served.stop()
    report(args, alone, rounds, lag_s)


def report(args: argparse.Namespace, alone: list[float], rounds: list[Round], lag_s: float) -> None:
    tokens = rounds[0].tokens
    bare_s = statistics.median(alone)
    loop_us = [1e6 * r.loop_cpu_s / tokens for r in rounds]
    output_us = [1e6 * r.output_cpu_s / tokens for r in rounds]
    result = {
        "streams": args.streams,
        "tokens_each": args.tokens,
        "wrong_texts": sum(r.wrong for r in rounds),
        "engine_tok_s": round(tokens / bare_s),
        "server_tok_s": round(tokens / statistics.median(r.seconds for r in rounds)),
        "overhead_us_per_token": round(statistics.median(a + b for a, b in zip(loop_us, output_us, strict=True)), 1),
        "event_loop_us_per_token": round(statistics.median(loop_us), 1),
        "text_us_per_token": round(statistics.median(output_us), 1),
        "wall_overhead_us_per_token": round(statistics.median(1e6 * (r.seconds - bare_s) / tokens for r in rounds), 1),
        "event_loop_lag_p99_ms": round(1e3 * lag_s, 1),
        "ttft_p50_s": round(statistics.median(rounds[-1].first_s), 2),
    }
    table = Table(title=f"{args.streams} streams of {args.tokens} tokens\n{machine_line()}", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in result.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    Console().print(table)
    print(json.dumps({"bench": "server", **result}))


if __name__ == "__main__":
    main()
