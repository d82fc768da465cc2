"""What 8-bit rows cost where weights stay as a GGUF stores them: `python -m bench.weights_quality`.

Gemma 3 270M (Q4_K_M) scores the text of `bench.kv_quality` in contexts of 2,048 tokens twice: packed, as it runs by
default, and with `--dtype float32`, which expands the same weights. Every token but a context's first is scored. The
figures are the perplexity of both, the change between them with its standard error over contexts, and the mean
Kullback-Leibler divergence of the next token. Results are kept in a file, so that a run that was cut short goes on.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
import torch.nn.functional as F

from bench.kv_quality import CONTEXT_TOKENS, CPU, MODEL, contexts
from bench.machine import machine_line
from windowpane.device.pages import KVPages
from windowpane.kv.layout import group_caches, plan_layout, resolve_formats
from windowpane.lowering.cpu.model import lower
from windowpane.lowering.linear import Parameters
from windowpane.models import load
from windowpane.models.embedded import embedded_path
from windowpane.models.running import runnable
from windowpane.models.spec import ModelSpec
from windowpane.schedule.step import Segment, Step
from windowpane.weights import load_weights

AT_ONCE = 256  # rows of logits
Score = tuple[float, float, float]  # of a context: negative log-likelihood packed and in float32, divergence


class Model:
    def __init__(self, spec: ModelSpec) -> None:
        weights = load_weights(embedded_path(MODEL), spec, dtype=torch.float32, device=CPU)
        decoder = runnable(spec)
        self._lowered = lower(decoder, Parameters(decoder, weights), CONTEXT_TOKENS)
        layout = plan_layout(
            list(spec.caches), resolve_formats("float32", group_caches(spec.caches), "float32"), "float32"
        )
        self._pages = KVPages(layout, 1, 1, CONTEXT_TOKENS, CPU)  # a context is one chunk: nothing is read from pages

    def hidden(self, tokens: list[int]) -> torch.Tensor:
        rows, nobody = np.arange(len(tokens)), np.zeros(0, dtype=np.int64)
        segments = (Segment(0, 0, len(tokens), 0, 0, len(tokens)),)
        step = Step(np.array(tokens, dtype=np.int32), rows, nobody, segments, segments, rows)
        return self._lowered.final_hidden(step, torch.tensor(tokens), self._pages)

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self._lowered.logits(hidden), -1)


@torch.inference_mode()
def score(packed: Model, expanded: Model, tokens: list[int]) -> Score:
    hidden = packed.hidden(tokens)[:-1], expanded.hidden(tokens)[:-1]
    totals, following = torch.zeros(3, dtype=torch.float64), torch.tensor(tokens[1:])
    for at in range(0, len(following), AT_ONCE):
        rows = slice(at, at + AT_ONCE)
        ours, exact = packed.log_probabilities(hidden[0][rows]), expanded.log_probabilities(hidden[1][rows])
        for place, found in enumerate((ours, exact)):
            totals[place] += F.nll_loss(found, following[rows], reduction="sum")
        totals[2] += F.kl_div(ours, exact, log_target=True, reduction="sum")
    ours_nll, exact_nll, divergence = (totals / len(following)).tolist()
    return ours_nll, exact_nll, divergence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_352, help="tokens of text, in contexts of 2,048")
    parser.add_argument("--results", type=Path, default=Path("weights_quality.json"), help="what was measured already")
    asked = parser.parse_args()
    scores: list[Score] = json.loads(asked.results.read_text()) if asked.results.exists() else []
    spec = load(embedded_path(MODEL))
    packed, expanded = Model(spec), Model(spec.expanded())
    for tokens in contexts(asked.tokens // CONTEXT_TOKENS)[len(scores) :]:
        scores.append(score(packed, expanded, tokens))
        asked.results.write_text(json.dumps(scores))
    changes = [ours - exact for ours, exact, _ in scores]
    figures = {
        "model": MODEL,
        "tokens": len(scores) * CONTEXT_TOKENS,
        "perplexity_packed": round(math.exp(mean(ours for ours, _, _ in scores)), 4),
        "perplexity_float32": round(math.exp(mean(exact for _, exact, _ in scores)), 4),
        "change": round(math.expm1(mean(changes)), 6),
        "standard_error": round(stdev(changes) / math.sqrt(len(changes)), 6) if len(changes) > 1 else None,
        "divergence": round(mean(divergence for *_, divergence in scores), 6),
    }
    print(f"{machine_line()}, torch {torch.__version__}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
