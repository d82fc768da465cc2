"""Experts and recurrent states beside transformers on a CPU: `python -m bench.cpu_families`.

Small models in float32 with random weights, the same in both engines, with the same threads. One case gives both
figures: the prompt alone, and the tokens decoded after it, one request at a time. transformers runs with its KV cache,
SDPA attention, and the faster of its own ways to run experts. Runs alternate, figures are medians; a ratio above 1
means that Windowpane is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from bench.cpu import CPU, Case, Here, Taken, There, alternate
from bench.machine import machine_line
from windowpane.models import from_config
from windowpane.native import build
from windowpane.weights import load_weights

WANTED = 1.3
EXPERT_WAYS = ("eager", "grouped_mm")  # of transformers
WITH_EXPERTS = ("qwen3_moe",)
NEW_TOKENS = 32
_SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# By name: tokens of the prompt, and the model. 0.58, 0.35 and 0.26 billion weights.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen3-moe": (
        512,
        {
            **_SHAPE,
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": 12,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 384,
            "norm_topk_prob": True,
        },
    ),
    "qwen3.5": (
        1024,
        {
            **_SHAPE,
            "model_type": "qwen3_5_text",
            "architectures": ["Qwen3_5ForCausalLM"],
            "num_hidden_layers": 16,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 4,
            "intermediate_size": 3072,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "mamba_ssm_dtype": "float32",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    ),
    "nemotron-h": (
        1024,
        {
            **_SHAPE,
            "model_type": "nemotron_h",
            "architectures": ["NemotronHForCausalLM"],
            "num_hidden_layers": 24,
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M*-M-M-M-",
            "intermediate_size": 4096,
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
        },
    ),
}


def prepared(described: dict[str, Any], case: Case) -> dict[str, Callable[[], Taken]]:
    """Windowpane and transformers with the same random weights, the latter once for each way to run experts."""
    torch.manual_seed(7)
    fields = dict(described)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.architectures = described["architectures"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    spec = from_config(described, "small")
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        weights = load_weights(directory, spec, dtype=torch.float32, device=CPU)
    theirs = There(model).prepare(case)

    def run(experts: str) -> Taken:
        if described["model_type"] in WITH_EXPERTS:
            model.set_experts_implementation(experts)
        return theirs()

    ways = EXPERT_WAYS if described["model_type"] in WITH_EXPERTS else EXPERT_WAYS[:1]
    return {"windowpane": Here(spec, weights).prepare(case)} | {way: partial(run, way) for way in ways}


def decoding(taken: Taken) -> float:
    return taken.total - taken.first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    table = Table(
        title=f"experts and states, float32, one request, tok/s\n{machine_line()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {torch.get_num_threads()} threads; "
        f"kernels: {build.why_not() or 'compiled'}",
        title_justify="left",
    )
    for column in ("model", "case", "windowpane", "transformers", "ratio", "wanted"):
        table.add_column(column, justify="left" if column in ("model", "case") else "right")
    results: dict[str, dict[str, float]] = {}
    for name in args.models:
        prompt_tokens, described = MODELS[name]
        case = Case(name, 1, prompt_tokens, NEW_TOKENS, WANTED)
        ours, *theirs = alternate(prepared(described, case), args.runs).values()
        for part, tokens, of in (
            (f"prefill {prompt_tokens:,}", prompt_tokens, lambda taken: taken.first),
            (f"decoding after {prompt_tokens:,}", NEW_TOKENS - 1, decoding),
        ):
            best = min(map(of, theirs))
            ratio = best / of(ours)
            results[f"{name}, {part}"] = {"tokens_per_s": round(tokens / of(ours), 2), "ratio": round(ratio, 3)}
            rates = (f"{tokens / seconds:.1f}" for seconds in (of(ours), best))
            cells = (name, part, *rates, f"{ratio:.2f} ×", f"{WANTED} ×")
            table.add_row(*cells)
            print(" | ".join(cells), file=sys.stderr, flush=True)
    Console(width=120).print(table)
    print(json.dumps({"bench": "cpu families", "results": results}))


if __name__ == "__main__":
    main()
