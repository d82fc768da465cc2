"""Windowpane beside transformers on a CPU: `python -m bench.cpu`.

Gemma 3 270M in float32 with the same weights and threads. transformers runs with its KV cache, with the faster of eager
and SDPA attention. Runs alternate, figures are medians; a ratio above 1 means that Windowpane is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from bench.machine import machine_line
from windowpane.embedded import embedded_path
from windowpane.kv.capacity import Capacity
from windowpane.kv.layout import group_caches, plan_layout, resolve_formats
from windowpane.kv.manager import KVManager
from windowpane.models import ModelSpec, load
from windowpane.request import Request, SamplingParams
from windowpane.runner import Runner
from windowpane.scheduler import Scheduler
from windowpane.weights import load_weights

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    name: str
    sequences: int
    prompt_tokens: int
    new_tokens: int
    wanted: float


CASES = (
    Case("512 + 128, alone", 1, 512, 128, 1.3),
    Case("512 + 128, batch of 8", 8, 512, 128, 1.8),
    Case("prefill 2,048", 1, 2048, 1, 1.2),
    Case("prefill 8,192", 1, 8192, 1, 1.2),
)


def prompts(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.prompt_tokens)
    return torch.randint(5, 200_000, (case.sequences, case.prompt_tokens), generator=generator)


class Here:
    """Windowpane: scheduler, manager and runner, greedy."""

    def __init__(self, spec: ModelSpec, weights: dict[str, torch.Tensor]) -> None:
        self.spec, self.weights = spec, weights
        formats = resolve_formats("auto", group_caches(spec.caches), "float32")
        self.layout = plan_layout(list(spec.caches), formats, "float32")

    def prepare(self, case: Case) -> Callable[[], list[list[int]]]:
        longest = case.prompt_tokens + case.new_tokens
        slabs = Capacity(self.layout, 0).slabs_for(case.sequences, longest) + 2 * case.sequences
        runner = Runner(
            self.spec,
            dict(self.weights),
            self.layout,
            slabs,
            case.sequences,
            longest,
            device=CPU,
            dtype=torch.float32,
        )
        rows = prompts(case).numpy()

        def run() -> list[list[int]]:
            manager = KVManager(self.layout, slabs, case.sequences, longest)
            scheduler = Scheduler(manager, max_num_batched_tokens=8192)
            params = SamplingParams(max_tokens=case.new_tokens)
            requests = [Request(str(i), row, params) for i, row in enumerate(rows)]
            for request in requests:
                scheduler.add(request)
            while scheduler.has_work:
                step(scheduler, runner)
            return [request.output for request in requests]

        return run


def step(scheduler: Scheduler, runner: Runner) -> None:
    batch = scheduler.schedule()
    assert batch is not None
    tokens = runner.forward(batch).logits.argmax(dim=-1)
    new = [c.slot for c in batch.chunks if c.samples]
    slots = np.concatenate([batch.decode_slots, np.array(new, dtype=np.int64)])
    runner.take_sampled(torch.from_numpy(slots), tokens)
    scheduler.commit(tokens.numpy())


class There:
    """transformers' own model with the same weights."""

    def __init__(self, spec: ModelSpec, weights: dict[str, torch.Tensor], attention: str) -> None:
        fields = {k: v for k, v in spec.text.fields.items() if k not in ("architectures", "model_type", "_windowpane")}
        config = Gemma3TextConfig(**fields)
        config._attn_implementation = attention
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        missing, unexpected = self.model.load_state_dict(weights, strict=False, assign=True)
        assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
        self.model.tie_weights()
        self.model.eval()

    def prepare(self, case: Case) -> Callable[[], list[list[int]]]:
        rows = prompts(case)

        @torch.inference_mode()
        def run() -> list[list[int]]:
            out = self.model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                do_sample=False,
                max_new_tokens=case.new_tokens,
                min_new_tokens=case.new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            return [row[case.prompt_tokens :].tolist() for row in out]

        return run


def alternate(runs: dict[str, Callable[[], list[list[int]]]], times: int) -> dict[str, float]:
    """Median seconds of each, run in turn; one more run of each beforehand warms up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(times + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))), help="which, from 0")
    args = parser.parse_args()
    path = embedded_path("gemma-3-270m")
    spec = load(path)
    weights = load_weights(path, spec, dtype=torch.float32, device=CPU)
    here = Here(spec, weights)
    there = {f"transformers {kind}": There(spec, weights, kind) for kind in ("eager", "sdpa")}
    console = Console()
    table = Table(
        title=f"Gemma 3 270M, float32\n{machine_line()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {torch.get_num_threads()} threads",
        title_justify="left",
    )
    for column in ("case", "windowpane", "eager", "sdpa", "ratio", "wanted"):
        table.add_column(column, justify="left" if column == "case" else "right")
    ratios = {}
    for case in (CASES[i] for i in args.cases):
        runs = {"windowpane": here.prepare(case), **{name: peer.prepare(case) for name, peer in there.items()}}
        seconds = alternate(runs, args.runs)
        tokens = case.sequences * (case.new_tokens if case.new_tokens > 1 else case.prompt_tokens)
        best = min(seconds[name] for name in there)
        ratios[case.name] = best / seconds["windowpane"]
        speeds = [f"{tokens / s:.1f} tok/s" for s in seconds.values()]
        table.add_row(case.name, *speeds, f"{ratios[case.name]:.2f} ×", f"{case.wanted} ×")
    console.print(table)
    print(json.dumps({"bench": "cpu", "ratios": ratios}))


if __name__ == "__main__":
    main()
