"""Clients that mean harm against a real server, beside one that only reads a stream.

Starts `windowpane serve` on a tiny random model in a process of its own. Clients send what tests/server/hostile.py
makes up. A victim streams answers all the time, in a process of its own too, so that it never waits for what the
clients make up; how long it waits between two pieces is compared with the time before the others came. Fails on an
answer of 5xx, a request that hangs, a server that ends, an event loop that is late by more than it may, or memory that
is still live when all have gone. A process that only sleeps says how often the machine itself was late by as much.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.machine import machine_line
from tests.server.hostile import ADMIN_KEY, Attack, attack
from tests.tiny_model import TEMPLATE, make_model

FLAGS = ["--load-format", "dummy", "--device", "cpu", "--port", "0", "--max-num-seqs", "16", "--log-level", "warning"]
FLAGS += ["--kv-cache-memory-bytes", "16MiB", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"]
FLAGS += ["--reasoning-parser", "qwen3", "--enable-admin", "--admin-key", ADMIN_KEY]
HANGS_S = 120.0  # many of the requests that came before may each take their few seconds
LONGEST_STEPS = 1024  # of a request: the model's whole length, and as many before its turn comes
ALONE_S = 3.0
# Sleeps until its input ends, then prints how often it woke up too late, and by how much at most.
BYSTANDER = """
import select, sys, time
late, longest_s, limit_s = 0, 0.0, float(sys.argv[1])
while True:
    due = time.monotonic() + 0.05
    if select.select([sys.stdin], [], [], 0.05)[0]:
        break
    by_s = time.monotonic() - due
    late, longest_s = late + (by_s > limit_s), max(longest_s, by_s)
print(late, longest_s)
"""
LAG = "windowpane:event_loop_lag_seconds"


class Served:
    """A server process, and what it says of itself. `said` is its log.

    `stacks`: it also says what ran when its event loop was late. Reading the frames of running threads may end it.
    """

    def __init__(self, folder: Path, *, stacks: bool = False) -> None:
        model = make_model(folder / "tiny", chat_template="{{ '!' if tools }}" + TEMPLATE)
        command = [sys.executable, "-m", "bench.late" if stacks else "windowpane", "serve", str(model), *FLAGS]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        self._up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._up.wait(120) or not (found := re.search(r"http://127\.0\.0\.1:\d+", "".join(self.said))):
            raise RuntimeError(f"the server did not start: {''.join(self.said)}")
        self.url = found[0]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if "curl " in line:
                self._up.set()
        self._up.set()

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=HANGS_S).text

    def late(self, limit_s: float) -> int:
        """How often the event loop was later than this, which is one of the histogram's bounds."""
        buckets = dict(re.findall(rf'^{LAG}_bucket{{le="([^"]+)".*?}} (\S+)$', self.metrics(), re.MULTILINE))
        return int(float(buckets["+Inf"]) - float(buckets[str(limit_s)]))

    def live(self) -> float:
        """Bytes of the arena that are live, and requests that run or wait."""
        text = self.metrics()
        found = re.findall(r'^windowpane:kv_bytes{.*state="live".*} (\S+)$', text, re.MULTILINE)
        found += re.findall(r"^windowpane:num_requests_(?:running|waiting){.*} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def resident_mib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) // 1024

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return -1
        finally:
            self._reader.join(10)
            if self.process.stderr is not None:
                self.process.stderr.close()


@dataclass
class Findings:
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    alone_gaps_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    late: int = 0
    bystander_late: int = 0
    bystander_longest_s: float = 0.0
    resident_mib: list[int] = field(default_factory=list)  # of the server alone, before and after
    seconds: float = 0.0
    slow: int = 0  # requests that were given up though they did not hang: the machine took so long for their steps


def send(client: httpx.Client, one: Attack, findings: Findings, what: str) -> None:
    """The victim gets a piece in every step: a request that is not answered while it got enough of them hangs."""
    steps_before = len(findings.gaps_s)
    try:
        with client.stream(one.method, one.path, content=one.content, headers=one.headers) as answer:
            findings.statuses[answer.status_code] += 1
            if one.leaves_early:
                next(answer.iter_raw(), b"")
                text = ""
            else:
                text = answer.read().decode(errors="replace")
            if answer.status_code >= 500:
                findings.failures.append(f"{what}: {answer.status_code} {text[:200]} to {one}")
    except httpx.TimeoutException:
        steps = len(findings.gaps_s) - steps_before
        if steps < LONGEST_STEPS:
            findings.slow += 1
        else:
            findings.failures.append(f"{what}: no answer within {HANGS_S} s, {steps} steps of the victim, to {one}")
    except httpx.TransportError as error:
        findings.failures.append(f"{what}: {type(error).__name__} {error} to {one}")


def harm(url: str, seed: int, until: float, findings: Findings) -> None:
    with httpx.Client(base_url=url, timeout=HANGS_S) as client:
        number = 0
        while time.monotonic() < until and len(findings.failures) < 20:
            one = attack(Random(seed * 1_000_003 + number))
            send(client, one, findings, f"client {seed} request {number}")
            number += 1


def read_streams(url: str, done: Event, told: Connection) -> None:
    """The victim: one stream after the other. Tells how long it waits between two pieces of each, or why it cannot."""
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 300, "ignore_eos": True, "stream": True, "seed": 1}
    with httpx.Client(base_url=url, timeout=HANGS_S) as client:
        while not done.is_set():
            try:
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    last = None
                    for piece in answer.iter_raw():
                        if piece.startswith(b":"):  # a sign of life: it waits for its turn
                            continue
                        now = time.monotonic()
                        if last is not None:
                            told.send(now - last)
                        last = now
                        if done.is_set():
                            break
            except httpx.TransportError as error:
                told.send(f"the victim: {type(error).__name__} {error}")
                return


def fuzz(served: Served, seconds: float, clients: int, seed: int, lag_limit_s: float) -> Findings:
    findings = Findings()
    _watch(served, findings.alone_gaps_s, findings, lambda: time.sleep(ALONE_S))
    late_before = served.late(lag_limit_s)
    findings.resident_mib.append(served.resident_mib())
    command = [sys.executable, "-c", BYSTANDER, str(lag_limit_s)]
    bystander = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    began = time.monotonic()

    def attack_all() -> None:
        until = began + seconds
        threads = [
            threading.Thread(target=harm, args=(served.url, seed * 1000 + i, until, findings)) for i in range(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    _watch(served, findings.gaps_s, findings, attack_all)
    findings.seconds = time.monotonic() - began
    late, longest_s = bystander.communicate()[0].split()
    findings.bystander_late, findings.bystander_longest_s = int(late), float(longest_s)
    _look_back(served, findings, late_before, lag_limit_s)
    return findings


def _watch(served: Served, gaps_s: list[float], findings: Findings, work: Callable[[], None]) -> None:
    """Do the work while the victim reads, from its first pieces on."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    done = context.Event()
    victim = context.Process(target=read_streams, args=(served.url, done, theirs))
    victim.start()
    theirs.close()
    reads = threading.Event()
    listener = threading.Thread(target=_listen, args=(ours, gaps_s, findings.failures, reads))
    listener.start()
    try:
        reads.wait(HANGS_S)
        work()
    finally:
        done.set()
        victim.join()
        listener.join()


def _listen(told: Connection, gaps_s: list[float], failures: list[str], reads: threading.Event) -> None:
    with suppress(EOFError):
        while True:
            gap_s = told.recv()
            reads.set()
            if isinstance(gap_s, str):
                failures.append(gap_s)
            else:
                gaps_s.append(gap_s)


def _look_back(served: Served, findings: Findings, late_before: int, lag_limit_s: float) -> None:
    if served.process.poll() is not None:
        findings.failures.append(f"the server ended with {served.process.returncode}: {''.join(served.said[-20:])}")
        return
    findings.late = served.late(lag_limit_s) - late_before
    findings.resident_mib.append(served.resident_mib())
    give_up = time.monotonic() + 30
    while served.live() and time.monotonic() < give_up:
        time.sleep(0.1)
    if left := served.live():
        findings.failures.append(f"{left:.0f} bytes or requests are live after all have gone")
    if traces := [line for line in served.said if "Traceback" in line]:
        findings.failures.append(f"{len(traces)} tracebacks in the log: {''.join(served.said)[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--lag-limit-s", type=float, default=0.1, help="a bound of the server's histogram")
    parser.add_argument(
        "--stacks", action="store_true", help="print what ran when the event loop was late; may end the server"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), stacks=args.stacks)
        try:
            findings = fuzz(served, args.minutes * 60, args.clients, args.seed, args.lag_limit_s)
        finally:
            code = served.stop()
    if code != 0:
        findings.failures.append(f"the server ended with exit code {code}: {''.join(served.said)[-2000:]}")
    if findings.late:
        stacks = "".join(served.said) if args.stacks else "--stacks prints what ran"
        findings.failures.append(f"the event loop was later than {args.lag_limit_s} s {findings.late} times; {stacks}")
    report(args, findings)
    return 1 if findings.failures else 0


def report(args: argparse.Namespace, findings: Findings) -> None:
    def milliseconds(gaps_s: list[float], share: int) -> float:
        return round(1e3 * statistics.quantiles(gaps_s, n=100)[share - 1], 1) if len(gaps_s) > 1 else 0.0

    result = {
        "seed": args.seed,
        "clients": args.clients,
        "minutes": round(findings.seconds / 60, 1),
        "requests": sum(findings.statuses.values()),
        "statuses": dict(sorted(findings.statuses.items())),
        "victim_gap_p50_ms": [milliseconds(findings.alone_gaps_s, 50), milliseconds(findings.gaps_s, 50)],
        "victim_gap_p99_ms": [milliseconds(findings.alone_gaps_s, 99), milliseconds(findings.gaps_s, 99)],
        "victim_gap_max_ms": [round(1e3 * max(gaps, default=0)) for gaps in (findings.alone_gaps_s, findings.gaps_s)],
        "resident_mib": findings.resident_mib,
        "times_late": findings.late,
        "bystander_times_late": findings.bystander_late,
        "bystander_longest_ms": round(1e3 * findings.bystander_longest_s),
        "slow": findings.slow,
        "failures": len(findings.failures),
    }
    table = Table(title=f"{args.clients} hostile clients; gaps alone, and beside them\n{machine_line()}")
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in result.items():
        table.add_row(name.replace("_", " "), str(value))
    Console().print(table)
    for failure in findings.failures:
        print(failure)
    print(json.dumps({"bench": "fuzz", **result}))


if __name__ == "__main__":
    sys.exit(main())
