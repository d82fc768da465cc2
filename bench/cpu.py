"""Windowpane beside transformers or llama.cpp on a CPU: `python -m bench.cpu`.

Beside transformers, Gemma 3 270M runs in float32 with the same weights and threads. transformers runs with its KV
cache, with the faster of eager and SDPA attention. tok/s counts new tokens over the whole run, prompt included, or
the prompt's where only that is run. "of the roof" is what the matrix products alone would take at the memory's or the
processor's measured best, as a share of the time really taken.

`--beside llama.cpp` runs both embedded GGUF files packed in both engines. There tok/s counts what was decoded after the
first token, the roof is the memory's (bytes of weights that a token reads), and what each engine holds is printed too.
`--generated` prints our own column for a random GGUF of the same shape: it needs neither the file nor llama.cpp.

Runs alternate, figures are medians; a ratio above 1 means that Windowpane is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LogitsProcessor, LogitsProcessorList

from bench import generated_gguf
from bench.llama_cpp import LlamaCpp
from bench.machine import machine_line
from bench.resident import resident_bytes
from windowpane.kv.capacity import Capacity
from windowpane.kv.layout import group_caches, plan_layout, resolve_formats
from windowpane.kv.manager import KVManager
from windowpane.lowering.cpu.logits import likeliest
from windowpane.models import ModelSpec, load
from windowpane.models.embedded import embedded_path
from windowpane.native import build
from windowpane.runners.plain import Runner
from windowpane.schedule.request import Request, SamplingParams
from windowpane.schedule.scheduler import Scheduler
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


# Beside llama.cpp, by the embedded model.
PACKED_CASES = {
    "gemma-3-270m": (
        Case("alone after 512", 1, 512, 128, 1.3),
        Case("batch of 8 after 512", 8, 512, 64, 1.5),
        Case("prefill 2,048", 1, 2048, 1, 2.0),
    ),
    "smollm2-135m-instruct": (Case("alone after 512", 1, 512, 128, 1.3), Case("prefill 2,048", 1, 2048, 1, 2.0)),
}
RESIDENT_TOKENS = 4096


@dataclass(frozen=True)
class Taken:
    """Seconds of one run: until the first token, and in all."""

    first: float
    total: float


class Clock(LogitsProcessor):
    """Started when made. transformers calls it with each step's logits, which it leaves alone."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.ticks: list[float] = []

    def tick(self) -> None:
        self.ticks.append(time.perf_counter() - self.start)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.tick()
        return scores

    def taken(self) -> Taken:
        return Taken(self.ticks[0], time.perf_counter() - self.start)


def prompts(case: Case, vocab_size: int = 200_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.prompt_tokens)
    return torch.randint(5, min(vocab_size, 200_000), (case.sequences, case.prompt_tokens), generator=generator)


class Here:
    """Windowpane: scheduler, manager and runner, greedy."""

    def __init__(self, spec: ModelSpec, weights: dict[str, torch.Tensor]) -> None:
        self.spec, self.weights = spec, weights
        formats = resolve_formats("auto", group_caches(spec.caches), "float32")
        self.layout = plan_layout(list(spec.caches), formats, "float32")

    def prepare(self, case: Case) -> Callable[[], Taken]:
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
        rows = prompts(case, self.spec.vocab_size).numpy()

        def run() -> Taken:
            manager = KVManager(self.layout, slabs, case.sequences, longest)
            scheduler = Scheduler(manager, max_num_batched_tokens=8192)
            params = SamplingParams(max_tokens=case.new_tokens)
            requests = [Request(str(i), row, params) for i, row in enumerate(rows)]
            for request in requests:
                scheduler.add(request)
            clock = Clock()
            while scheduler.has_work:
                step(scheduler, runner)
                clock.tick()
            return clock.taken()

        return run


def step(scheduler: Scheduler, runner: Runner) -> None:
    batch = scheduler.schedule()
    assert batch is not None
    tokens = likeliest(runner.forward(batch).logits)  # as the sampler takes it
    new = [c.slot for c in batch.chunks if c.samples]
    slots = np.concatenate([batch.decode_slots, np.array(new, dtype=np.int64)])
    runner.take_sampled(torch.from_numpy(slots), tokens)
    scheduler.commit(tokens.numpy())


class There:
    """transformers' own model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @classmethod
    def of_gemma(cls, spec: ModelSpec, weights: dict[str, torch.Tensor], attention: str) -> There:
        """With the same weights."""
        fields = {k: v for k, v in spec.text.fields.items() if k not in ("architectures", "model_type", "_windowpane")}
        config = Gemma3TextConfig(**fields)
        config._attn_implementation = attention
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
        assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
        model.tie_weights()
        return cls(model.eval())

    def prepare(self, case: Case) -> Callable[[], Taken]:
        rows = prompts(case, self.model.config.vocab_size)

        @torch.inference_mode()
        def run() -> Taken:
            clock = Clock()
            self.model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                do_sample=False,
                max_new_tokens=case.new_tokens,
                min_new_tokens=case.new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([clock]),
            )
            return clock.taken()

        return run


@dataclass(frozen=True)
class Roof:
    """What this machine can do, measured: a product that reads a large matrix once, and one of large matrices."""

    bytes_per_s: float
    flop_per_s: float

    @classmethod
    def measure(cls) -> Roof:
        matrix, vector = torch.randn(65536, 1024), torch.randn(1024)
        square = torch.randn(2048, 2048)
        reading = min(timed(lambda: matrix @ vector) for _ in range(7))
        computing = min(timed(lambda: square @ square) for _ in range(5))
        return cls(matrix.numel() * 4 / reading, 2 * 2048**3 / computing)

    def seconds(self, weights: int, rows: int) -> float:
        """The least that products of so many rows with these weights can take."""
        return max(4 * weights / self.bytes_per_s, 2 * weights * rows / self.flop_per_s)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def share_of_roof(case: Case, taken: Taken, spec: ModelSpec, roof: Roof) -> float:
    """Products alone, at the roof, of the time that was taken: decoding where a case decodes, else its prefill."""
    embedding = spec.tensors[0].elements
    layers = sum(t.elements for t in spec.tensors) - embedding
    if case.new_tokens == 1:
        return roof.seconds(layers, case.prompt_tokens) / taken.total
    step_seconds = (taken.total - taken.first) / (case.new_tokens - 1)
    return roof.seconds(layers + embedding, case.sequences) / step_seconds


def alternate(runs: dict[str, Callable[[], Taken]], times: int) -> dict[str, Taken]:
    """Medians of each, run in turn; one more run of each beforehand warms up."""
    taken: dict[str, list[Taken]] = {name: [] for name in runs}
    for turn in range(times + 1):
        for name, run in runs.items():
            one = run()
            if turn:
                taken[name].append(one)
    return {
        name: Taken(statistics.median(t.first for t in each), statistics.median(t.total for t in each))
        for name, each in taken.items()
    }


def report(case: Case, taken: dict[str, Taken], share: float) -> tuple[list[str], dict[str, float]]:
    """A row of the table, and of the JSON line. The peer is the faster of the others, part by part."""
    ours, *others = taken.values()
    tokens = case.sequences * (case.new_tokens if case.new_tokens > 1 else case.prompt_tokens)
    figures = {
        "tokens_per_s": tokens / ours.total,
        "ratio": min(t.total for t in others) / ours.total,
        "first_token_ratio": min(t.first for t in others) / ours.first,
        "share_of_roof": share,
    }
    if case.new_tokens > 1:
        figures["decode_ms"] = 1e3 * (ours.total - ours.first) / (case.new_tokens - 1)
        figures["decode_ratio"] = min(t.total - t.first for t in others) / (ours.total - ours.first)
    decode = f"{figures['decode_ms']:.1f} ms, {figures['decode_ratio']:.2f} ×" if "decode_ms" in figures else ""
    cells = [
        case.name,
        *(f"{tokens / t.total:.1f}" for t in taken.values()),
        f"{figures['ratio']:.2f} ×",
        f"{case.wanted} ×",
        f"{figures['first_token_ratio']:.2f} ×",
        decode,
        f"{share:.0%}",
    ]
    return cells, {name: round(value, 3) for name, value in figures.items()}


def packed_tokens_per_s(case: Case, taken: Taken) -> float:
    """Of the prompt where only that is run, else of what was decoded after the first token."""
    if case.new_tokens == 1:
        return case.sequences * case.prompt_tokens / taken.total
    return case.sequences * (case.new_tokens - 1) / (taken.total - taken.first)


def packed(paths: dict[str, Path], runs: int, *, beside: bool) -> None:
    """GGUF files as they are stored, by the models' names in `PACKED_CASES`; alone, or beside llama.cpp."""
    roof, threads = Roof.measure(), torch.get_num_threads()
    engines = ("windowpane", "llama.cpp") if beside else ("windowpane",)
    table = Table(
        title=f"packed GGUF weights, tok/s\n{machine_line()}, torch {torch.__version__}, {threads} threads\n"
        f"roof: {roof.bytes_per_s / 1e9:.1f} GB/s; kernels: {build.why_not() or 'compiled'}",
        title_justify="left",
    )
    for column in ("model", "case", *engines, *(("ratio", "wanted") if beside else ()), "of the roof"):
        table.add_column(column, justify="left" if column in ("model", "case") else "right")
    results: dict[str, dict[str, float]] = {}

    def add(model: str, case: str, figures: list[float], wanted: str, share: float | None, *, digits: int) -> float:
        ratio = figures[0] / figures[-1]
        cells = [model, case, *(f"{figure:.{digits}f}" for figure in figures)]
        cells += [*([f"{ratio:.2f} ×", wanted] if beside else []), f"{share:.0%}" if share else ""]
        table.add_row(*cells)
        print(" | ".join(cells), file=sys.stderr, flush=True)
        return ratio

    for model, path in paths.items():
        spec = load(path)
        weights = load_weights(path, spec, dtype=torch.float32, device=CPU)
        weight_bytes = sum(w.nbytes for w in weights.values())
        here, there = Here(spec, weights), LlamaCpp(path, threads) if beside else None
        for case in PACKED_CASES[model]:
            timed_runs = {"windowpane": here.prepare(case)}
            if there is not None:
                timed_runs["llama.cpp"] = partial(
                    _ticked, there.prepare(prompts(case, spec.vocab_size).numpy(), case.new_tokens)
                )
            rates = [packed_tokens_per_s(case, taken) for taken in alternate(timed_runs, runs).values()]
            share = rates[0] / case.sequences * weight_bytes / roof.bytes_per_s if case.new_tokens > 1 else None
            ratio = add(model, case.name, rates, f"{case.wanted} ×", share, digits=1)
            found = {"tokens_per_s": rates[0]} | ({"share_of_roof": share} if share else {})
            if beside:
                found |= {"llama_cpp_tokens_per_s": rates[1], "ratio": ratio}
            results[f"{model}, {case.name}"] = found
        held = {engine: resident_bytes(engine, str(path), RESIDENT_TOKENS) for engine in engines}
        own = [float(after - before) for before, after in held.values()]
        whole = ", ".join(f"{engine} {after / 2**20:.0f}" for engine, (_, after) in held.items())
        label = f"MiB beside imports (whole process: {whole})"
        ratio = add(model, label, [held_bytes / 2**20 for held_bytes in own], "≤ 1.0 ×", None, digits=0)
        results[f"{model}, resident"] = {f"{e} bytes": b for e, b in zip(engines, own, strict=True)}
        if beside:
            results[f"{model}, resident"]["ratio"] = ratio
    Console(width=140).print(table)
    print(json.dumps({"bench": "cpu beside llama.cpp" if beside else "cpu, packed", "results": results}))


def _ticked(peer: Callable[[Callable[[], None]], None]) -> Taken:
    clock = Clock()
    peer(clock.tick)
    return clock.taken()


def generated(runs: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "generated-gemma-3-270m-Q4_K_M.gguf"
        generated_gguf.write(path)
        packed({"gemma-3-270m": path}, runs, beside=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each (all of it takes about 40 minutes)")
    names = ", ".join(f"{i}: {case.name}" for i, case in enumerate(CASES))
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))), help=f"which ({names})")
    parser.add_argument("--peers", nargs="*", default=["eager", "sdpa"], help="attention of transformers")
    parser.add_argument("--beside", choices=["transformers", "llama.cpp"], default="transformers")
    parser.add_argument("--generated", action="store_true", help="a random GGUF in Gemma's shape, without a peer")
    parser.add_argument("--threads", type=int, help="of both engines; this machine's cores where left out")
    args = parser.parse_args()
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of the processes whose memory is measured
        torch.set_num_threads(args.threads)
    if args.generated:
        generated(args.runs)
        return
    if args.beside == "llama.cpp":
        packed({model: embedded_path(model) for model in PACKED_CASES}, args.runs, beside=True)
        return
    path = embedded_path("gemma-3-270m")
    spec = load(path).expanded()
    weights = load_weights(path, spec, dtype=torch.float32, device=CPU)
    here = Here(spec, weights)
    there = {f"transformers {kind}": There.of_gemma(spec, weights, kind) for kind in args.peers}
    roof = Roof.measure()
    table = Table(
        title=f"Gemma 3 270M, float32, tok/s\n{machine_line()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {torch.get_num_threads()} threads\n"
        f"roof: {roof.bytes_per_s / 1e9:.1f} GB/s, {roof.flop_per_s / 1e9:.1f} GFLOP/s; "
        f"kernels: {build.why_not() or 'compiled'}",
        title_justify="left",
    )
    for column in ("case", "windowpane", *args.peers, "ratio", "wanted", "first token", "a step", "of the roof"):
        table.add_column(column, justify="left" if column == "case" else "right")
    results = {}
    for case in (CASES[i] for i in args.cases):
        runs = {"windowpane": here.prepare(case), **{name: peer.prepare(case) for name, peer in there.items()}}
        taken = alternate(runs, args.runs)
        share = share_of_roof(case, taken["windowpane"], spec, roof)
        cells, results[case.name] = report(case, taken, share)
        table.add_row(*cells)
        print(" | ".join(cells), file=sys.stderr, flush=True)  # each takes minutes
    Console(width=120).print(table)
    print(json.dumps({"bench": "cpu", "results": results}))


if __name__ == "__main__":
    main()
