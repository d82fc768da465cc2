"""Many long sequences at once on a GPU: resident, and decoding together.

    python3 -m bench.long [--sequences 10] [--tokens 131072]

Gemma 4 31B with random weights, in the KV bytes that vLLM 0.26.0 had left on the same card (64.74 GiB, of which it
promised 1.81 such sequences). Nobody waits for ten prompts of that length here: the pages are handed out by the manager
as in a real run, and hold random values.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from windowpane.engine.start import start
from windowpane.schedule.batch import Batch

GIB = 2**30
STEPS = 8
FLAGS = {
    "load_format": "dummy",
    "device": "cuda",
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 69_510_103_040,
    "enable_prefix_caching": False,
}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=131_072)
    given = parser.parse_args()
    started = start("gemma-4-31b", {**FLAGS, "max_model_len": given.tokens})
    manager, runner = started.engine.manager, started.runner
    for piece in runner.arena.view(torch.bfloat16).split(2**28):
        piece.normal_()
    slots = np.arange(given.sequences)
    past = given.tokens - STEPS - 1
    for slot in slots.tolist():
        manager.start(slot, given.tokens)
        manager.extend(slot, past)
    live = sum(manager.group_bytes(g).live for g in range(len(manager.tables)))
    print(f"{given.sequences} sequences of {given.tokens:,} tokens hold {live / GIB:.2f} GiB", flush=True)
    milliseconds = []
    for step in range(STEPS):
        for slot in slots.tolist():
            manager.extend(slot, past + step + 1)
        positions = np.full(given.sequences, past + step)
        batch = Batch(step, slots, positions, [], np.zeros(given.sequences, dtype=np.int8), manager.take_changes())
        torch.cuda.synchronize()
        began = time.perf_counter()
        logits = runner.forward(batch).logits
        torch.cuda.synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - began))
        if not bool(logits.isfinite().all()):
            raise SystemExit("logits have NaN or Inf: a page was read that nobody filled")
        runner.take_sampled(torch.arange(given.sequences, device=logits.device), logits.argmax(-1))
    median = statistics.median(milliseconds)
    print(f"a step takes {median:.1f} ms: {1e3 * given.sequences / median:.0f} tokens a second")


if __name__ == "__main__":
    main()
