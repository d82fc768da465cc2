"""What decoding requests feel while a long prompt is computed beside them, with and without `--max-itl-ms`.

    python3 -m bench.pace                                                          # the embedded model, on a CPU
    python3 -m bench.pace --model gemma-4-31b --device cuda --prompt 65536 --limits 0 100 200 400

Some requests decode; then a long prompt arrives. For each limit (0: none) it prints how long they waited from one token
to the next until the long prompt had its first token, and how long that took. Models by name have random weights, and
the last line is JSON.
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

from windowpane.engine.engine import Engine
from windowpane.engine.start import start
from windowpane.models import shipped_names
from windowpane.models.embedded import DEFAULT_GENERATE
from windowpane.schedule.pace import Pace
from windowpane.schedule.request import Request, SamplingParams

SETTLING_STEPS = 12  # of decoding alone, before the prompt arrives: also what its pace is told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_GENERATE)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the long prompt")
    parser.add_argument("--decoding", type=int, default=4, help="requests that decode meanwhile")
    parser.add_argument("--limits", type=float, nargs="*", default=[0, 400], help="milliseconds; 0: none")
    given = parser.parse_args()
    flags: dict[str, Any] = {"device": given.device, "max_model_len": given.prompt + 2048, "max_num_seqs": 64}
    if given.model in shipped_names():
        flags["load_format"] = "dummy"
    started = start(given.model, {**flags, "enable_prefix_caching": False})
    generator = np.random.default_rng(0)
    table = Table("limit", "alone, ms", "median, ms", "99 %, ms", "longest, ms", "first token of the prompt, s")
    results = []
    for limit in [given.limits[0], *given.limits]:  # the first round warms up
        found = measure(started.engine, started.spec.vocab_size, given, limit, generator)
        results.append(found)
        print({"limit_ms": limit, **found}, flush=True)
    for limit, found in zip(given.limits, results[1:], strict=True):
        table.add_row(f"{limit:g}" if limit else "none", *(f"{value:.1f}" for value in found.values()))
    Console().print(table)
    named = [{"limit_ms": limit, **found} for limit, found in zip(given.limits, results[1:], strict=True)]
    print(json.dumps({"bench": "pace", "prompt_tokens": given.prompt, "decoding": given.decoding, "results": named}))


def measure(
    engine: Engine, vocab_size: int, given: argparse.Namespace, limit: float, generator: np.random.Generator
) -> dict[str, float]:
    engine.scheduler.pace = Pace(limit / 1e3) if limit else None

    def add(name: str, tokens: int, new_tokens: int) -> Request:
        prompt = generator.integers(5, vocab_size, tokens).astype(np.int32)
        request = Request(name, prompt, SamplingParams(max_tokens=new_tokens))
        engine.add(request)
        return request

    decoding = [add(f"decoding {i}", 64, 2000) for i in range(given.decoding)]
    while any(len(r.output) < 2 for r in decoding):
        engine.step()
    alone = [waited(engine, decoding[0]) for _ in range(SETTLING_STEPS)]
    began = time.perf_counter()
    long = add("long", given.prompt, 2)
    beside = []
    while not long.output:
        beside.append(waited(engine, decoding[0]))
    first_token_seconds = time.perf_counter() - began
    for request in (*decoding, long):
        engine.cancel(request)
    while engine.has_work:
        engine.step()
    beside.sort()
    return {
        "alone_ms": round(1e3 * statistics.median(alone), 2),
        "median_ms": round(1e3 * statistics.median(beside), 2),
        "p99_ms": round(1e3 * beside[min(len(beside) - 1, int(0.99 * len(beside)))], 2),
        "longest_ms": round(1e3 * beside[-1], 2),
        "first_token_s": round(first_token_seconds, 3),
    }


def waited(engine: Engine, request: Request) -> float:
    """Seconds until the request has its next token."""
    known, began = len(request.output), time.perf_counter()
    while len(request.output) == known:
        engine.step()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
