"""Check and time the spike's kernels on one GPU: `python3 -m bench.spike.run [--parts latent,sliding,…]`."""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator

import torch
import triton

from bench.spike.measure import Row, microseconds
from bench.spike.run_decode import full_pair_rows, int8_rows, latent_rows, sliding_rows
from bench.spike.run_writer import writer_rows

ARENA_BYTES = 54 * 2**30  # 64 windows of Gemma 4 31B are 51 GiB
PARTS = ("ceiling", "latent", "pair", "sliding", "int8", "writer")


def ceiling_rows(arena: torch.Tensor) -> Iterator[Row]:
    """What this GPU gives a plain copy and a plain matrix product: the roofs of everything below."""
    size = 2**32
    source, target = (arena[i * size : (i + 1) * size].view(torch.float32).normal_() for i in range(2))
    us = microseconds(lambda: torch.neg(source, out=target))
    yield Row("ceiling", "negate 4 GiB of float32, bytes read and written", us, 2 * size / us / 1e6, "TB/s")
    us = microseconds(lambda: torch.amax(source))
    yield Row("ceiling", "maximum of 4 GiB of float32, bytes read", us, size / us / 1e6, "TB/s")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    us = microseconds(lambda: torch.mm(a, b))
    yield Row("ceiling", "bf16 matrix product, 8,192 cubed", us, 2 * 8192**3 / us / 1e6, "TFLOP/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)}")
    args = parser.parse_args()
    chosen = args.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    torch.manual_seed(time.time_ns() % 2**31)  # fresh data every run: a kernel must be right on any of it
    properties = torch.cuda.get_device_properties(0)
    machine = {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    arena = torch.empty(ARENA_BYTES, dtype=torch.uint8, device="cuda")
    parts = {
        "ceiling": lambda: ceiling_rows(arena),
        "latent": lambda: latent_rows(arena),
        "pair": lambda: full_pair_rows(arena),
        "sliding": lambda: sliding_rows(arena),
        "int8": lambda: int8_rows(arena),
        "writer": lambda: writer_rows(arena),
    }
    results: list[Row] = []
    failed: list[str] = []
    for part in chosen:
        try:
            for row in parts[part]():
                results.append(row)
                print(row.line(), flush=True)
        except Exception:
            # the other parts still have something to say
            failed.append(part)
            traceback.print_exc(limit=4, file=sys.stdout)
    print(json.dumps({"machine": machine, "rows": [row.as_dict() for row in results], "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
