"""What a KV format costs in quality: Gemma 3 270M against float32 KV. `python -m bench.kv_quality`.

The text is Python's own documentation as every Python carries it (`pydoc_data/topics.py`, then the sources of the
standard library; PSF licence), cut into contexts of 2,048 tokens, four windows long. Every `--every`-th token from 768
on is scored: by then windows have slid past what they began with. All formats score the same tokens.

Two figures each. The perplexity change is what others quote; a few thousand tokens leave it an error of several tenths
of a percent, given beside it (the standard error over contexts). The divergence (mean Kullback-Leibler divergence of
the next token from that with float32 KV) is what the perplexity change would be on text that the model wrote; it is
never negative and far more exact.

K and V go through their format exactly as the engine's present does. Results are kept in a file, so that a run that was
cut short goes on where it stopped, and a longer run adds to a shorter one; formats may be scored over more or fewer
contexts than others. `--keep` makes the figures those that `--fit` chooses by.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import time
from collections.abc import Iterator, Sequence
from itertools import count, takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.machine import machine_line
from windowpane.device.pages import KVPages
from windowpane.kv.layout import group_caches, plan_layout, resolve_formats
from windowpane.lowering.cpu.model import lower
from windowpane.lowering.linear import Parameters
from windowpane.lowering.scales import Calibration, settle_scales, warm_up_text
from windowpane.models import load
from windowpane.models.embedded import embedded_path
from windowpane.models.running import runnable
from windowpane.plan import quality
from windowpane.schedule.step import Segment, Step
from windowpane.text.tokenizer import load_tokenizer
from windowpane.weights import load_weights

CPU = torch.device("cpu")
MODEL = "gemma-3-270m"
CONTEXT_TOKENS = 2048
SCORED_FROM = 768
BASELINE = "float32"
FORMATS = (
    "bfloat16", "int8_per_token_head", "fp8_per_token_head", "fp8_e4m3", "fp8_e5m2", "int4_per_token_head",
)  # fmt: skip
BY_GROUP = (
    "full=int4_per_token_head", "window=int4_per_token_head", "full=int4_per_token_head,window=int8_per_token_head",
)  # fmt: skip
KEPT = Path(quality.__file__).with_name(quality.FIGURES)
Score = tuple[float, float]  # mean negative log-likelihood and divergence of a context's scored tokens


def text() -> Iterator[str]:
    """The language reference, then library sources in alphabetical order: the same everywhere for one Python."""
    yield "\n\n".join(pydoc_data.topics.topics.values())
    for path in sorted(Path(pydoc_data.topics.__file__).parents[1].glob("*.py")):
        yield path.read_text("utf-8", errors="replace")


def contexts(count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(embedded_path(MODEL))
    beginning, tokens = tokenizer.encode("")[:1], []
    for piece in text():
        tokens += tokenizer.encode(piece, add_special_tokens=False)
        if len(tokens) >= count * CONTEXT_TOKENS:
            break
    width = CONTEXT_TOKENS - len(beginning)
    cuts = range(0, min(len(tokens), count * width) - width + 1, width)
    return [beginning + tokens[at : at + width] for at in cuts]


class Scorer:
    """Gemma 3 270M in float32, with KV in any formats."""

    def __init__(self) -> None:
        self.spec = load(embedded_path(MODEL)).expanded()
        weights = load_weights(embedded_path(MODEL), self.spec, dtype=torch.float32, device=CPU)
        decoder = runnable(self.spec)
        self.model = lower(decoder, Parameters(decoder, weights), CONTEXT_TOKENS)
        self._known = Calibration(tokens=load_tokenizer(embedded_path(MODEL)).encode(warm_up_text()))
        self._pages: dict[str, KVPages] = {}

    def pages(self, kv_cache_dtype: str) -> KVPages:
        """A context is one chunk: nothing is read from pages, and what is written to them lands on the same few."""
        if kv_cache_dtype not in self._pages:
            formats = resolve_formats(kv_cache_dtype, group_caches(self.spec.caches), "float32")
            layout = plan_layout(list(self.spec.caches), formats, "float32")
            pages = KVPages(layout, 1, 1, CONTEXT_TOKENS, CPU)
            settle_scales(self.model, pages, self._known)
            self._pages[kv_cache_dtype] = pages
        return self._pages[kv_cache_dtype]

    @torch.inference_mode()
    def log_probabilities(self, kv_cache_dtype: str, tokens: list[int], every: int) -> torch.Tensor:
        """[scored tokens, vocabulary]."""
        rows, nobody = np.arange(len(tokens)), np.zeros(0, dtype=np.int64)
        segments = (Segment(0, 0, len(tokens), 0, 0, len(tokens)),)
        step = Step(np.array(tokens, dtype=np.int32), rows, nobody, segments, segments, rows)
        hidden = self.model.final_hidden(step, torch.tensor(tokens), self.pages(kv_cache_dtype))
        return torch.log_softmax(self.model.logits(hidden[scored(tokens, every)]), -1)

    def scores(self, names: Sequence[str], tokens: list[int], every: int) -> Iterator[tuple[str, Score]]:
        following = torch.tensor([tokens[at + 1] for at in scored(tokens, every)])
        base = self.log_probabilities(BASELINE, tokens, every)
        for name in (BASELINE, *names):
            found = base if name == BASELINE else self.log_probabilities(name, tokens, every)
            divergence = float(torch.nn.functional.kl_div(found, base, log_target=True, reduction="batchmean"))
            yield name, (float(torch.nn.functional.nll_loss(found, following)), divergence)


def scored(tokens: list[int], every: int) -> range:
    return range(SCORED_FROM, len(tokens) - 1, every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40_960, help="tokens of text, in contexts of 2,048")
    parser.add_argument("--every", type=int, default=4, help="score one token in so many")
    parser.add_argument("--formats", nargs="*", default=[*FORMATS, *BY_GROUP])
    parser.add_argument("--results", type=Path, default=Path("kv_quality.json"), help="what was measured already")
    parser.add_argument("--keep", action="store_true", help=f"write the figures to {KEPT.name} of the package")
    asked = parser.parse_args()
    console = Console()
    scores: dict[str, Score] = json.loads(asked.results.read_text()) if asked.results.exists() else {}
    cuts = contexts(asked.tokens // CONTEXT_TOKENS)
    scorer = Scorer()
    began = time.perf_counter()
    for index in track(range(len(cuts)), "contexts", console=console):
        missing = [name for name in asked.formats if _key(name, asked.every, index) not in scores]
        if not missing and _key(BASELINE, asked.every, index) in scores:
            continue
        for name, score in scorer.scores(missing, cuts[index], asked.every):
            scores[_key(name, asked.every, index)] = score
            asked.results.write_text(json.dumps(scores))
    figures = summary(scores, asked.every)
    console.print(f"{machine_line()}, torch {torch.__version__}, {time.perf_counter() - began:.0f} s")
    report(console, figures)
    if asked.keep:
        KEPT.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures))


def _key(name: str, every: int, index: int) -> str:
    return f"{name} {every} {index}"


def summary(scores: dict[str, Score], every: int) -> dict[str, Any]:
    """Of all that was measured: each format over its own contexts, always the first ones of the text."""
    scored_tokens = len(range(SCORED_FROM, CONTEXT_TOKENS - 1, every))
    base = _of_format(scores, BASELINE, every)
    found = {}
    for name in (*FORMATS, *BY_GROUP):
        mine = _of_format(scores, name, every)
        if not mine:
            continue
        changes = [score[0] - b[0] for score, b in zip(mine, base, strict=False)]
        found[name] = {
            "contexts": len(mine),
            "scored_tokens": len(mine) * scored_tokens,
            "perplexity_change": round(math.expm1(mean(changes)), 6),
            "standard_error": round(stdev(changes) / math.sqrt(len(mine)), 6) if len(mine) > 1 else None,
            "divergence": round(mean(score[1] for score in mine), 6),
        }
    return {
        "model": MODEL,
        "context_tokens": CONTEXT_TOKENS,
        "contexts": len(base),
        "perplexity": round(math.exp(mean(score[0] for score in base)), 3),
        "formats": found,
    }


def _of_format(scores: dict[str, Score], name: str, every: int) -> list[Score]:
    """Of contexts from the first on, without a gap."""
    keys = takewhile(scores.__contains__, (_key(name, every, index) for index in count()))
    return [scores[key] for key in keys]


def report(console: Console, figures: dict[str, Any]) -> None:
    console.print(
        f"{figures['model']}, contexts of {figures['context_tokens']:,} tokens, perplexity with float32 KV "
        f"{figures['perplexity']} over {figures['contexts']}"
    )
    table = Table("KV format", "contexts", "scored", "perplexity change", "standard error", "divergence")
    for name, found in figures["formats"].items():
        error = "" if found["standard_error"] is None else f"{found['standard_error']:.2%}"
        counts = (f"{found['contexts']}", f"{found['scored_tokens']:,}")
        table.add_row(name, *counts, f"{found['perplexity_change']:+.2%}", error, f"{found['divergence']:.3%}")
    console.print(table)


if __name__ == "__main__":
    main()
