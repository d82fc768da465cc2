"""Tokens a second with drafts and without, in turn, on the same engine.

    python3 -m bench.drafts                                        # the embedded models and prompt lookup, on a CPU
    python3 -m bench.drafts --model gemma-4-31b --device cuda --rate 0.85 --assistant --requests 1 16 128

Without `--rate`, ten prompts that ask for an edit (answers repeat most of them) and ten of plain prose are answered
one by one, drafted by prompt lookup. With `--rate`, weights and prompts are random, and each draft is taken for right
with that probability whatever the model samples, which gives steps their shapes and nothing else a meaning. Drafts cost
no time of their own, unless an `--assistant` of the shape of Gemma 4 31B's (4 layers of width 1,024) makes as many
beside them. `--eager` verifies all of them, where the engine would choose how many are worth it. Rates count from a
round's first token on; the last line is JSON.
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
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.known_drafts import Eager, KnownAnswers, Overheard
from bench.machine import machine_line
from windowpane import models
from windowpane.drafts.drafter import Drafter, ModelDrafter
from windowpane.drafts.ngram import NgramDrafter
from windowpane.drafts.speculator import Speculator
from windowpane.engine import sent_step
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
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=10, help="of each kind, without --rate")
    parser.add_argument("--rate", type=float, help="share of drafts that are taken for right")
    parser.add_argument("--requests", type=int, nargs="*", default=[1], help="at once, with --rate")
    parser.add_argument("--prompt", type=int, default=512, help="tokens, with --rate")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--assistant", action="store_true", help="with --rate: an assistant drafts, and is timed")
    given = parser.parse_args()
    results = rated(given) if given.rate is not None else [r for name in _names(given) for r in texts(name, given)]
    table = Table("model", "load", "plain, tok/s", "drafts, tok/s", "×", "accepted", "drafted", "tokens a step")
    for r in results:
        figures = (f"{r['plain']:.1f}", f"{r['drafts']:.1f}", f"{r['ratio']:.2f}", f"{r['accepted']:,}")
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
    chance = np.random.default_rng(2)

    def taken_for_right(sampled: Sequence[int], proposed: Tokens) -> int:
        wrong = np.flatnonzero(chance.random(len(proposed)) >= given.rate)
        return int(wrong[0]) if len(wrong) else len(proposed)

    sent_step.accepted = taken_for_right
    any_tokens: Drafter = KnownAnswers(lambda request: [7] * request.params.max_tokens, 1.0, always_most=True)
    if given.assistant:
        assert started.runner.drafter is not None
        any_tokens = Overheard(ModelDrafter(started.runner.drafter), any_tokens)
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
    """Each load answered without and with drafts in turn; rates are medians of the rounds behind a first one."""
    plain, drafted, speculator = [], [], make_speculator()
    steps = tokens = 0
    for round_number in range(rounds + 1):
        if round_number == 1:
            speculator.stats = make_speculator().stats
            steps = tokens = 0
        engine.speculator = None
        answers, rate, _ = run(engine, loads, params)
        plain.append(rate)
        engine.speculator = speculator
        with_drafts, rate, count = run(engine, loads, params)
        drafted.append(rate)
        steps, tokens = steps + count, tokens + sum(len(a) for a in with_drafts)
    stats = speculator.stats
    same = sum(a == b for a, b in zip(answers, with_drafts, strict=True))
    middle = [statistics.median(rates[1:]) for rates in (plain, drafted)]
    return {
        "plain": middle[0], "drafts": middle[1], "ratio": middle[1] / middle[0], "accepted": stats.accepted_tokens,
        "drafted": stats.draft_tokens, "tokens_a_step": tokens / max(steps, 1),
        "same_answers": f"{same} of {len(answers)}",
    }  # fmt: skip


def run(
    engine: Engine, loads: Sequence[Sequence[Tokens]], params: SamplingParams
) -> tuple[list[list[int]], float, int]:
    """Answers, tokens a second behind the first ones, and steps that gave some."""
    answers, seconds, tokens, steps = [], 0.0, 0, 0
    for load in loads:
        requests = [Request(str(i), prompt, params) for i, prompt in enumerate(load)]
        for request in requests:
            engine.add(request)
        while not all(request.output for request in requests):
            engine.step()
        before, began = sum(len(r.output) for r in requests), time.perf_counter()
        while engine.has_work:
            steps += bool(engine.step())
        seconds += time.perf_counter() - began
        tokens += sum(len(r.output) for r in requests) - before
        for request in requests:
            if request.error is not None:
                raise request.error
        answers += [request.output for request in requests]
    return answers, tokens / seconds, steps


if __name__ == "__main__":
    main()
