"""The fused decoder in Triton's interpreter against the plain one: the same greedy tokens. Run by its test, with the
names of models, between semicolons, and of a KV format where it is not the activations' own.

With `chained` behind the name, what lies between two layers' attention of one row goes where the launch for it goes on
a GPU, and is computed by plain torch: the interpreter does not know that kernel. With `unchained`, the runner is told
to leave it out. With `routed`, the experts that tokens visited are compared too. With `drafted`, steps verify drafts;
with `assisted`, an assistant's are compared, with `drafting` the model's own, with `layered` those of its own layer for
that. With `adapted`, two of three requests have an adapter each. With `restored`, prompts begin as earlier ones did,
and answers are compared with and without restore points.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.gpu_checks import engine
from bench.gpu_checks.chain import in_torch
from bench.gpu_checks.engine import Setting, run
from tests.running.small_models import CONFIGS, FULL, LINEAR, QUANTIZED, SLIDING
from windowpane.drafts.drafter import Known
from windowpane.lowering.gpu import chaining
from windowpane.lowering.gpu.kernels.chain import ChainScratch, Links
from windowpane.runners import cuda, graphs, multi_token
from windowpane.runners.cuda import CudaRunner
from windowpane.schedule.request import Tokens

# The interpreter takes milliseconds for each program of each launch: everything is as small as it can be.
_TINY: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TINY = {
    "llama": {**CONFIGS["llama with biases"], **_TINY},
    "gemma4": {
        **CONFIGS["gemma4 everything"],
        **_TINY,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 24,
    },
}
_TINY_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TINY |= {
    "gpt-oss": {
        **CONFIGS["gpt-oss"],
        **_TINY,
        **_TINY_EXPERTS,
        "intermediate_size": 32,
        "layer_types": [SLIDING, FULL],
        "sliding_window": 8,
    },
    "gemma4 experts": {
        **CONFIGS["gemma4 experts"],
        **_TINY,
        "layer_types": [SLIDING, FULL],
        "sliding_window": 8,
        "global_head_dim": 32,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "llama 4": {
        **CONFIGS["llama 4"],
        **_TINY,
        "intermediate_size_mlp": 16,
        "attention_chunk_size": 4,
        "no_rope_layers": [1, 0],
    },
    "glm 4.5": {**CONFIGS["glm 4.5"], **_TINY, "moe_intermediate_size": 16},
}
TINY |= {
    # Wide enough for a group of 32.
    "llama int4": {**QUANTIZED["llama int4"], **_TINY, "intermediate_size": 32},
    "qwen3 experts int4": {**QUANTIZED["qwen3 experts int4"], **_TINY, "moe_intermediate_size": 32},
    "gpt-oss mxfp4": {**TINY["gpt-oss"], "quantization_config": QUANTIZED["gpt-oss mxfp4"]["quantization_config"]},
    "gemma4 int4": {
        **QUANTIZED["gemma4 int4"],
        **_TINY,
        "intermediate_size": 32,
        "layer_types": [SLIDING, FULL],
        "sliding_window": 8,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 24,
    },
}
_TINY_DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 1}
_TINY_MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8}
TINY |= {
    "qwen3.5": {**CONFIGS["qwen3.5"], **_TINY, **_TINY_DELTA, "layer_types": [LINEAR, FULL]},
    "qwen3-next": {
        **CONFIGS["qwen3-next"],
        **_TINY,
        **_TINY_DELTA,
        "layer_types": [FULL, LINEAR],  # the last one that keeps anything has a state
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
    },
    "nemotron-h": {
        **CONFIGS["nemotron-h"],
        **_TINY,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*ME",
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "granite hybrid": {
        **CONFIGS["granite hybrid"],
        **_TINY,
        **_TINY_MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 16,
    },
    "falcon-h1": {**CONFIGS["falcon-h1"], **_TINY, **_TINY_MAMBA, "mamba_d_ssm": 96, "mamba_d_head": 24},
    "lfm2": {**CONFIGS["lfm2"], **_TINY, "layer_types": ["conv", FULL]},
}
# A chunk over an empty past, one over a past longer than the window, mixed steps and decoding ones.
LENGTHS, NEW_TOKENS, DRAFTED_TOKENS, CHUNK_TOKENS = (1, 2, 13), 3, 5, 10
CHAINED, UNCHAINED, ROUTED, DRAFTED, ADAPTED = " chained", " unchained", " routed", " drafted", " adapted"
RESTORED = " restored"
DRAFTING = {" assisted": engine.ASSISTANT, " drafting": engine.ITSELF, " layered": engine.OWN_LAYER}


def main() -> None:
    torch.set_num_threads(1)
    names, kv_cache_dtype = (*sys.argv[1:], "auto")[:2]
    for name in names.split(";"):
        check(name, kv_cache_dtype)


def check(name: str, kv_cache_dtype: str) -> None:
    suffixes = (CHAINED, UNCHAINED, ROUTED, DRAFTED, ADAPTED)
    for suffix, who in DRAFTING.items():
        if name.endswith(suffix):
            name = name.removesuffix(suffix)
            CONFIGS[name] = TINY[name]
            check_drafter(name, who)
            return
    if name.endswith(RESTORED):
        name = name.removesuffix(RESTORED)
        CONFIGS[name] = TINY[name]
        engine.restored_equals_cold(name, "cpu", (16, 17), 2)
        return
    is_chained, is_unchained, routes, drafts, adapted = (name.endswith(suffix) for suffix in suffixes)
    for suffix in suffixes:
        name = name.removesuffix(suffix)
    (QUANTIZED if name in QUANTIZED else CONFIGS)[name] = TINY[name]
    chains: list[Links] = []
    if is_chained or is_unchained:
        chain_in_torch(chains)
    if is_unchained:
        engine.CudaRunner = partial(CudaRunner, use_chain=False)
    settings = [
        Setting(fused, False, False, CHUNK_TOKENS, kv_cache_dtype, routes, adapters=2 * adapted)
        for fused in (False, True)
    ]
    new_tokens = DRAFTED_TOKENS if drafts else NEW_TOKENS
    found = [run(name, settings[0], "cpu", LENGTHS, new_tokens)]
    fused = replace(settings[1], drafts=3) if drafts else settings[1]
    found.append(run(name, fused, "cpu", LENGTHS, new_tokens, answers=found[0]))
    if found[0] != found[1]:
        sys.exit(f"{name}: plain torch has {found[0]}, the kernels have {found[1]}")
    if is_unchained and chains:
        sys.exit(f"{name}: layers were chained though the runner was told not to")
    # One row is alone in as many steps as the last layer, behind which nothing follows, was chained.
    steps = sum(links.following is None for links in chains)
    if is_chained and not 0 < steps * TINY[name]["num_hidden_layers"] == len(chains):
        sys.exit(f"{name}: not every layer was chained to the next")


def check_drafter(name: str, who: str) -> None:
    replayed = layers_in_graphs() if who == engine.OWN_LAYER else [0]
    engine.drafter_equals_reference(name, who, "cpu", (1, 13), 14 if who == engine.ASSISTANT else 6)
    if not replayed:
        sys.exit(f"{name}: no graph of drafts was replayed")


def layers_in_graphs() -> list[int]:
    """Has layers for multi-token prediction capture graphs, which run what they captured. Returns the sizes that do."""
    replayed = []

    class Replay:
        def __init__(self, run: Callable[[], None], pool: None) -> None:
            self.replay = run
            run()  # a capture runs it once before, and what it leaves behind is what the next capture begins with

    class Drafting(multi_token.MultiTokenLayers):
        def __init__(self, *args: Any, use_graphs: bool) -> None:
            super().__init__(*args, use_graphs=True)

        def draft(self, known: Sequence[Known]) -> list[Tokens]:
            replayed.append(len(known))
            return super().draft(known)

    # As many captures as a runner for more sequences makes.
    graphs.ladder = lambda slots: [1, 1, 1, slots]
    graphs.capture, cuda.MultiTokenLayers = Replay, Drafting
    torch.cuda.graph_pool_handle = lambda: None
    return replayed


def chain_in_torch(chains: list[Links]) -> None:
    """Has every layer chained that has the weights for it; what ran is added to `chains`."""

    def run_chain(
        attended: torch.Tensor, hidden: torch.Tensor, links: Links, scratch: ChainScratch, *, pdl: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chains.append(links)
        assert scratch.results.shape == (2, 2 * hidden.shape[1] + links.down.inputs)
        assert links.following is None or len(links.following) <= scratch.most_following
        following, after = in_torch(attended, hidden, links, hidden.dtype)
        return following, after

    chaining.has_chain = lambda links, dtype: True
    chaining.run_chain = run_chain
    chaining.try_chain = lambda links, scratch, dtype, *, pdl: None


if __name__ == "__main__":
    main()
