"""Every kernel and the engine on a GPU against plain torch; needs nothing but the repository.

    python3 -m bench.gpu_check [WORD …]     only checks whose name contains one of the words
    python3 -m bench.gpu_check --timings    kernel timings as well

Exit status 1 when a check fails.
"""

from __future__ import annotations

import sys
import time
import traceback

import torch

from bench.gpu_checks import (
    attention,
    chain,
    engine,
    experts,
    formats,
    fused,
    hopper,
    mamba2,
    overlap,
    parallel,
    quantized,
    states,
)


def main() -> None:
    words = [w for w in sys.argv[1:] if not w.startswith("-")]
    torch.manual_seed(time.time_ns() % 2**31)
    modules = (attention, overlap, hopper, fused, quantized, experts, chain, engine, formats, parallel, states, mamba2)
    checks = [check for module in modules for check in module.checks()]
    failed = []
    for name, check in checks:
        if words and not any(word in name for word in words):
            continue
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
    print(f"{len(failed)} failed")
    if "--timings" in sys.argv:
        for module in (attention, hopper, fused, quantized, experts, chain, formats, states):
            module.timings()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
