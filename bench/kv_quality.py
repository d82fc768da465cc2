"""What a KV format costs in quality: perplexity of Gemma 3 270M against float32 KV. `python -m bench.kv_quality`.

The text is Python's own documentation as every Python carries it (`pydoc_data/topics.py`, then the sources of the
standard library; PSF licence), cut into contexts of 2,048 tokens, four windows long. Every `--every`-th token from 768
on is scored: by then windows have slid past what they began with. All formats score the same tokens, so differences are
more exact than the perplexities themselves; the error beside each is the standard error over contexts.

K and V go through their format exactly as the engine's present does. Results are kept in a file, so that a run that was
cut short goes on where it stopped, and a longer run adds to a shorter one.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.machine import machine_line
from windowpane.attention.pages import KVPages
from windowpane.attention.step import Segment, Step
from windowpane.embedded import embedded_path
from windowpane.kv.layout import group_caches, plan_layout, resolve_formats
from windowpane.modeling.decoder import Decoder
from windowpane.modeling.recipe import read_recipe
from windowpane.modeling.scales import settle_scales
from windowpane.models import load
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
BY_GROUP = ("full=int4_per_token_head", "window=int4_per_token_head")


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
        self.spec = load(embedded_path(MODEL))
        weights = load_weights(embedded_path(MODEL), self.spec, dtype=torch.float32, device=CPU)
        self.model = Decoder(read_recipe(self.spec), weights)
        self._pages: dict[str, KVPages] = {}

    def pages(self, kv_cache_dtype: str) -> KVPages:
        """A context is one chunk: nothing is read from pages, and what is written to them lands on the same few."""
        if kv_cache_dtype not in self._pages:
            formats = resolve_formats(kv_cache_dtype, group_caches(self.spec.caches), "float32")
            layout = plan_layout(list(self.spec.caches), formats, "float32")
            pages = KVPages(layout, 1, 1, CONTEXT_TOKENS, CPU)
            settle_scales(self.model, pages, {}, CONTEXT_TOKENS)
            self._pages[kv_cache_dtype] = pages
        return self._pages[kv_cache_dtype]

    @torch.inference_mode()
    def loss(self, kv_cache_dtype: str, tokens: list[int], every: int) -> float:
        """Mean negative log-likelihood of the scored tokens."""
        ids = torch.tensor(tokens)
        asking = torch.arange(SCORED_FROM, len(tokens) - 1, every)
        nobody = np.zeros(0, dtype=np.int64)
        segment = Segment(0, 0, len(tokens), 0)
        step = Step(ids, torch.arange(len(tokens)), (segment,), asking, nobody, nobody)
        logits = self.model.forward(step, self.pages(kv_cache_dtype))
        return float(torch.nn.functional.cross_entropy(logits, ids[asking + 1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40_960, help="tokens of text, in contexts of 2,048")
    parser.add_argument("--every", type=int, default=4, help="score one token in so many")
    parser.add_argument("--formats", nargs="*", default=[*FORMATS, *BY_GROUP])
    parser.add_argument("--results", type=Path, default=Path("kv_quality.json"), help="what was measured already")
    asked = parser.parse_args()
    console = Console()
    losses: dict[str, float] = json.loads(asked.results.read_text()) if asked.results.exists() else {}
    cuts = contexts(asked.tokens // CONTEXT_TOKENS)
    scorer = Scorer()
    began = time.perf_counter()
    for index in track(range(len(cuts)), "contexts", console=console):
        for name in (BASELINE, *asked.formats):
            key = f"{name} {asked.every} {index}"
            if key not in losses:
                losses[key] = scorer.loss(name, cuts[index], asked.every)
                asked.results.write_text(json.dumps(losses))
    report(console, losses, asked, len(cuts), time.perf_counter() - began)


def report(console: Console, losses: dict[str, float], asked: argparse.Namespace, count: int, seconds: float) -> None:
    base = [losses[f"{BASELINE} {asked.every} {i}"] for i in range(count)]
    scored = count * len(range(SCORED_FROM, CONTEXT_TOKENS - 1, asked.every))
    console.print(f"{machine_line()}, torch {torch.__version__}, {seconds:.0f} s")
    console.print(
        f"{MODEL}, {count} contexts of {CONTEXT_TOKENS:,} tokens, {scored:,} tokens scored, "
        f"perplexity with float32 KV {math.exp(mean(base)):.3f}"
    )
    table = Table("KV format", "perplexity change", "standard error")
    found = {}
    for name in asked.formats:
        changes = [losses[f"{name} {asked.every} {i}"] - b for i, b in enumerate(base)]
        change, error = math.expm1(mean(changes)), stdev(changes) / math.sqrt(count) if count > 1 else math.nan
        table.add_row(name, f"{change:+.3%}", f"{error:.3%}")
        found[name] = {"change": change, "standard_error": error}
    console.print(table)
    print(json.dumps({"contexts": count, "scored": scored, "perplexity": math.exp(mean(base)), "formats": found}))


if __name__ == "__main__":
    main()
