"""Tokens a second with drafts and without, in turn, on the same engine.

    python3 -m bench.drafts                                        # the embedded models and prompt lookup, on a CPU
    python3 -m bench.drafts --model gemma-4-31b --device cuda --rate 0.85 --assistant --requests 1 16 128

Without `--rate`, ten prompts that ask for an edit (answers repeat most of them) and ten of plain prose are answered
one by one, drafted by prompt lookup. With `--rate`, weights and prompts are random, and each draft is what the model
samples with that probability, which gives steps their shapes and nothing else a meaning. Drafts cost no time of their
own, unless an `--assistant` of the shape of Gemma 4 31B's (4 layers of width 1,024) makes as many beside them.
`--eager` verifies all of them, where the engine would choose how many are worth it.

Each prompt is answered without and with drafts in turn; its seconds, from the first token on, are medians over rounds.
Processor seconds of the same answers, which other programs change little, have a ratio of their own. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.known_drafts import Eager, KnownAnswers, sample_drafts
from bench.machine import machine_line
from windowpane import models
from windowpane.drafts.drafter import Drafter, ModelDrafter
from windowpane.drafts.ngram import NgramDrafter
from windowpane.drafts.speculator import Speculator
from windowpane.engine.engine import Engine
from windowpane.engine.start import Started, start
from windowpane.models.embedded import EMBEDDED
from windowpane.schedule.request import Request, SamplingParams, Tokens
from windowpane.text import load_tokenizer

EDITS = Path(__file__).with_name("edits.txt")  # functions, each under a line "# NAME -> ANOTHER NAME"
PROSE = (
    "The history of the lighthouse begins with", "A good cup of coffee depends on", "When the river froze that winter,",
    "The three main causes of the war were", "My grandmother used to say that", "To plant an apple tree, first",
    "The city at night is", "Scientists have recently found that", "The letter began with the words",
    "In the middle of the desert there is",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the embedded models unless given")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafts", type=int, help="of a sequence in a step (8, and 4 with --rate)")
    parser.add_argument("--new-tokens", type=int, help="of an answer (48, and 96 with --rate)")
    parser.add_argument("--rounds", type=int, help="of all prompts (2, and 3 with --rate)")
    parser.add_argument("--prompts", type=int, default=10, help="of each kind, without --rate")
    parser.add_argument("--rate", type=float, help="share of drafts that are taken for right")
    parser.add_argument("--requests", type=int, nargs="*", default=[1], help="at once, with --rate")
    parser.add_argument("--prompt", type=int, default=512, help="tokens, with --rate")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--assistant", action="store_true", help="with --rate: an assistant drafts, and is timed")
    given = parser.parse_args()
    given.new_tokens = given.new_tokens or (48 if given.rate is None else 96)
    given.rounds = given.rounds or (2 if given.rate is None else 3)
    results = rated(given) if given.rate is not None else [r for name in _names(given) for r in texts(name, given)]
    table = Table(
        "model",
        "load",
        "plain, tok/s",
        "drafts, tok/s",
        "×",
        "× CPU",
        "accepted",
        "drafted",
        "tokens a step",
        box=None,
    )
    for r in results:
        figures = (f"{r['plain']:.1f}", f"{r['drafts']:.1f}", f"{r['ratio']:.2f}", f"{r['processor_ratio']:.2f}")
        figures += (f"{r['accepted']:,}",)
        table.add_row(r["model"], r["load"], *figures, f"{r['drafted']:,}", f"{r['tokens_a_step']:.2f}")
    Console().print(table)
    print(machine_line())
    print(json.dumps({"bench": "drafts", "drafts": given.drafts, "rate": given.rate, "results": results}))


def _names(given: argparse.Namespace) -> Sequence[str]:
    return [given.model] if given.model else list(EMBEDDED)


def texts(model: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    started = _start(model, given, given.drafts or 8, max_model_len=2048, max_num_seqs=8)
    tokenizer = load_tokenizer(started.text_source)
    edits = [
        f"Original code:\n```python\n{code}```\n\nThe same code with {old} renamed to {new}:\n```python\n"
        for old, new, code in re.findall(r"# (\w+) -> (\w+)\n(.*?)(?=\n\n# |\Z)", EDITS.read_text("utf-8"), re.DOTALL)
    ][: given.prompts]
    params = SamplingParams(max_tokens=given.new_tokens, temperature=0)

    def speculator() -> Speculator:
        return Speculator(NgramDrafter(5, 2), given.drafts or 8)

    found = []
    for load, prompts in (("edits", edits), ("prose", PROSE[: given.prompts])):
        loads = [[np.array(tokenizer.encode(prompt), dtype=np.int32)] for prompt in prompts]
        found.append({"model": model, "load": load} | compare(started.engine, loads, params, speculator, given.rounds))
    return found


def rated(given: argparse.Namespace) -> list[dict[str, Any]]:
    most, drafts = max(given.requests), given.drafts or 4
    flags = {"max_model_len": given.prompt + given.new_tokens, "max_num_seqs": most, "load_format": "dummy"}
    started = _start(given.model or "gemma-4-31b", given, drafts, **flags)
    sample_drafts(started.engine, given.rate)
    any_tokens: Drafter = KnownAnswers(lambda request: [7] * request.params.max_tokens, 1.0, always_most=True)
    if given.assistant:
        assert started.runner.drafter is not None
        any_tokens = ModelDrafter(started.runner.drafter)
    rng, params = np.random.default_rng(3), SamplingParams(max_tokens=given.new_tokens, temperature=0, ignore_eos=True)
    kind, found = Eager if given.eager else Speculator, []
    for count in given.requests:
        prompts = [rng.integers(5, started.spec.vocab_size, given.prompt).astype(np.int32) for _ in range(count)]
        measured = compare(started.engine, [prompts], params, lambda: kind(any_tokens, drafts), given.rounds)
        found.append({"model": started.spec.name, "load": f"{count} requests"} | measured)
        print(found[-1], flush=True)
    return found


def _start(model: str, given: argparse.Namespace, drafts: int, **flags: Any) -> Started:
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": drafts}
    shared = {"device": given.device, "speculative_config": config, "enable_prefix_caching": False}
    if not given.assistant:
        return start(model, {**shared, **flags})
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(assistant_config(model)))
        config |= {"method": "mtp", "model": directory}
        return start(model, {**shared, **flags})


def assistant_config(target: str) -> dict[str, Any]:
    """An assistant for this Gemma 4, of the shape of 31B's."""
    spec = models.load(target)
    text = dict(spec.text.fields) | {
        "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "hidden_size_per_layer_input": 0,
        "enable_moe_block": False, "use_double_wide_mlp": False,
    }  # fmt: skip
    return {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "text_config": text,
        "backbone_hidden_size": spec.hidden_size,
    }  # fmt: skip


def compare(
    engine: Engine,
    loads: Sequence[Sequence[Tokens]],
    params: SamplingParams,
    make_speculator: Callable[[], Speculator],
    rounds: int,
) -> dict[str, Any]:
    """Each load answered without and with drafts in turn, behind a first one that counts for nothing."""
    speculator = make_speculator()
    for way in (None, speculator):
        answer(engine, loads[0], params, way)
    speculator.stats = make_speculator().stats
    plain: list[list[Answered]] = [[] for _ in loads]
    drafted: list[list[Answered]] = [[] for _ in loads]
    for _ in range(rounds):
        for number, load in enumerate(loads):
            for way, found in ((None, plain), (speculator, drafted)):
                found[number].append(answer(engine, load, params, way))
    stats, tokens = speculator.stats, [sum(runs[0].tokens for runs in way) for way in (plain, drafted)]
    same = sum(a[0].answers == b[0].answers for a, b in zip(plain, drafted, strict=True))
    seconds, processor = (
        [sum(statistics.median(getattr(run, clock) for run in runs) for runs in way) for way in (plain, drafted)]
        for clock in ("seconds", "processor_seconds")
    )
    rates = [count / taken for count, taken in zip(tokens, seconds, strict=True)]
    given_tokens, steps = (sum(getattr(run, what) for runs in drafted for run in runs) for what in ("tokens", "steps"))
    return {
        "plain": rates[0], "drafts": rates[1], "ratio": rates[1] / rates[0],
        "processor_ratio": tokens[1] / processor[1] / (tokens[0] / processor[0]), "accepted": stats.accepted_tokens,
        "drafted": stats.draft_tokens, "tokens_a_step": given_tokens / max(steps, 1),
        "same_answers": f"{same} of {len(loads)}",
    }  # fmt: skip


class Answered(NamedTuple):
    """Of requests that ran together: their answers; and tokens, steps and seconds behind the first tokens."""

    answers: list[list[int]]
    tokens: int
    steps: int
    seconds: float
    processor_seconds: float


def answer(engine: Engine, load: Sequence[Tokens], params: SamplingParams, speculator: Speculator | None) -> Answered:
    engine.speculator = speculator
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(load)]
    for request in requests:
        engine.add(request)
    while not all(request.output for request in requests):
        engine.step()
        if any(request.finish_reason is not None for request in requests):
            raise SystemExit(f"{len(load)} requests do not fit into the arena together: give a smaller --prompt")
    before, steps = sum(len(r.output) for r in requests), 0
    began, processor = time.perf_counter(), time.process_time()
    while engine.has_work:
        steps += bool(engine.step())
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    for request in requests:
        if request.error is not None:
            raise request.error
    tokens = sum(len(r.output) for r in requests) - before
    return Answered([request.output for request in requests], tokens, steps, seconds, processor)


if __name__ == "__main__":
    main()
