"""An engine that sleeps and wakes on a GPU: its memory is given back, and answers stay the same.

Memory is what torch holds of the driver's, so that checks beside this one change nothing. On a CPU, where it is that of
the process, everything runs too, which is how it is tested without a GPU.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.running.adapters import RANK, write_adapter
from tests.tiny_model import make_model
from windowpane import LLM, LoRARequest, SamplingParams
from windowpane.models import from_config
from windowpane.runners.cuda import CudaRunner
from windowpane.text.answer import Completion

MIB = 2**20
ROUNDS = 2  # of sleeping and waking
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs": {"enforce_eager": True},
    "adapters, drafts and a host tier": {
        "dtype": "float32",  # how many drafts a step verifies depends on how long steps took
        "enable_lora": True,
        "max_lora_rank": RANK,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "kv_offloading_size": "64MiB",
    },
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model and its arena; `stays_bytes` of all that was taken may stay while it sleeps."""

    model: dict[str, Any]
    arena_bytes: int
    stays_bytes: int


ON_GPU = Sizes(
    {
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_attention_heads": 8,
        "head_dim": 128,
        "sliding_window": 64,
        "max_position_embeddings": 4096,
    },
    arena_bytes=2**30,
    stays_bytes=192 * MIB,  # cuBLAS keeps a workspace of 32 MiB for each stream, and kernels keep flags
)


def checks() -> list[tuple[str, Callable[[], str]]]:
    return [
        (f"sleep at level {level}: {way}", partial(sleeps, level, flags))
        for way, flags in WAYS.items()
        for level in (1, 2)
    ]


def sleeps(level: int, flags: dict[str, Any], device: str = "cuda", sizes: Sizes = ON_GPU) -> str:
    """Cold answers and those from cached prefixes, before and after; and the memory that is held meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        model, poet = make_model(Path(folder) / "model", **sizes.model), None
        if "enable_lora" in flags:
            spec = from_config(json.loads((model / "config.json").read_text()), "tiny")
            write_adapter(Path(folder) / "poet", spec, 1, lora_alpha=40)
            poet = LoRARequest("poet", 1, f"{folder}/poet")
        before = held_bytes(device)
        with LLM(
            model, device=device, load_format="dummy", kv_cache_memory_bytes=sizes.arena_bytes, max_num_seqs=8,
            max_num_batched_tokens=128, max_model_len=256, **flags,
        ) as llm:  # fmt: skip
            runner: Any = llm.engine.runner
            if isinstance(runner, CudaRunner):
                assert (runner.graphs is None) == bool(flags.get("enforce_eager"))
            runner.arena.fill_(0)  # a CPU's takes memory now
            del runner
            cold, cached = (answers(llm, poet) for _ in range(2))
            assert cached[0].cached_tokens
            assert not poet or cold[0].token_ids != cold[-1].token_ids, "the adapter changes nothing"
            awake, asleep, free = held_bytes(device), 0, [free_bytes(device)]
            if poet:
                (Path(folder) / "poet" / "adapter_model.safetensors").unlink()  # adapters are read once
            for _ in range(ROUNDS):
                given = llm.sleep(level)
                assert given >= 0.99 * sizes.arena_bytes and llm.sleep(level) == 0, f"{given:,} bytes are given back"
                asleep = held_bytes(device)
                free.append(free_bytes(device))
                _check_gone(before, awake, asleep, device, sizes)
                llm.wake_up()
                same = [answers(llm, poet), answers(llm, poet)]
                assert same == [cold, cached], "tokens differ after waking"
                assert not any(one.cached_tokens for one in same[0]), "KV is still there after sleeping"
                assert same[1][0].cached_tokens, "prefixes are not kept after waking"
                assert held_bytes(device) <= awake + sizes.stays_bytes, "each round takes more"
            llm.engine.manager.check_idle()
    held = ", ".join(
        f"{size / MIB:,.0f} {when}" for size, when in ((before, "before"), (awake, "awake"), (asleep, "asleep"))
    )
    return f"MiB held {held}; the machine has {(free[1] - free[0]) / MIB:,.0f} more while it sleeps"


def answers(llm: LLM, adapter: LoRARequest | None) -> Sequence[Completion]:
    """Several at once, of prompts longer than a window; the last has the adapter, if there is one."""
    prompts = ["a prompt that is long enough to be kept and found again " * 2, "b", "one of middle length. " * 3]
    adapters = [None] * len(prompts) if adapter is None else [None, None, None, adapter]
    return llm.generate([*prompts, prompts[0]][: len(adapters)], GREEDY, lora_request=adapters)


def held_bytes(device: str) -> int:
    if device == "cpu":
        return int(psutil.Process().memory_info().rss)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def free_bytes(device: str) -> int:
    """Of the whole machine, where other processes have their part in it: told, not checked."""
    return int(psutil.virtual_memory().available if device == "cpu" else torch.cuda.mem_get_info()[0])


def _check_gone(before: int, awake: int, asleep: int, device: str, sizes: Sizes) -> None:
    if device != "cpu":  # the runner goes as a whole
        assert asleep <= before + sizes.stays_bytes, f"{asleep - before:,} bytes are still held"
        return
    assert awake - asleep >= sizes.arena_bytes - sizes.stays_bytes, f"only {awake - asleep:,} bytes went"
