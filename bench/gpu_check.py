"""Every kernel and the engine on a GPU against plain torch; needs nothing but the repository.

    python3 -m bench.gpu_check [WORD …]     only checks whose name contains one of the words
    python3 -m bench.gpu_check --jobs 8     in as many processes, since compiling kernels takes most of the time
    python3 -m bench.gpu_check --timings    kernel timings as well, behind the checks

Exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback

import torch

from bench.gpu_checks import (
    adapters,
    attention,
    chain,
    drafters,
    engine,
    experts,
    formats,
    fused,
    hopper,
    mamba2,
    overlap,
    parallel,
    quantized,
    sleep,
    states,
)

MODULES = (
    attention, overlap, hopper, fused, adapters, quantized, experts, states, mamba2, chain, engine, drafters, formats,
    parallel, sleep,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--share", help=argparse.SUPPRESS, default="0/1")  # of the checks, of one of several processes
    parser.add_argument("--timings", action="store_true")
    arguments = parser.parse_args()
    if arguments.jobs > 1:
        failed = run_jobs(arguments.words, arguments.jobs)
    else:
        failed = run_checks(arguments.words, *map(int, arguments.share.split("/")))
    if arguments.timings:
        for module in (attention, hopper, fused, adapters, quantized, experts, states, chain, formats):
            module.timings()
    sys.exit(bool(failed))


def run_jobs(words: list[str], jobs: int) -> bool:
    """Each process prints its own checks as they end."""
    command = [sys.executable, "-m", "bench.gpu_check", *words, "--share"]
    processes = [subprocess.Popen([*command, f"{job}/{jobs}"]) for job in range(jobs)]
    statuses = [process.wait() for process in processes]
    return any(statuses)


def run_checks(words: list[str], share: int, shares: int) -> bool:
    torch.manual_seed(time.time_ns() % 2**31)
    checks = [check for module in MODULES for check in module.checks()]
    checks = [check for check in checks if not words or any(word in check[0] for word in words)]
    failed = []
    for name, check in checks[share::shares]:
        began = time.perf_counter()
        try:
            told = check()
            state = "ok  "
        except Exception as error:
            told, state = f"{type(error).__name__}: {error}", "FAIL"
            failed.append((name, traceback.format_exc()))
        print(f"{state} {name}: {told or ''} ({time.perf_counter() - began:.1f} s)", flush=True)
    for name, trace in failed[:4]:
        print(f"\n{name}\n{trace[-1500:]}")
    print(f"{len(failed)} of {len(checks[share::shares])} failed", flush=True)
    return bool(failed)


if __name__ == "__main__":
    main()
