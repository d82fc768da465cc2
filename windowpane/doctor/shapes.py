"""From the name in a log to a model whose shapes are known."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from windowpane.models import ModelError, ModelSpec, load, shipped_name, shipped_repositories
from windowpane.models.hub import Hub, parse_name

# What a repository's name adds to the shape: training stage and weight format. KV does not depend on them.
_SUFFIX = re.compile(
    r"[-_.](it|instruct|base|chat|hf|pt|fp8|nvfp4|mxfp4|bf16|awq|gptq|gguf|int4|int8|4bit|8bit|w4a16|w8a8|dynamic|qat|"
    r"autoround|quantized|w4a8|mtp|thinking|reasoning|block|kv|\d{4}|\d{8})(?=[-_.]|$)"
)

# Models that are not shipped and whose layers keep what a shipped one's do.
_SAME_KV = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-v3.1": "deepseek-v3",
    "llama-3.3-70b": "llama-3.1-70b",
    "meta-llama-3.1-70b": "llama-3.1-70b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "minimax-m2.1": "minimax-m2",
    "minimax-m2.5": "minimax-m2",
    "minimax-m2.7": "minimax-m2",
    "nemotron-cascade-2-30b-a3b": "nemotron-3-nano-30b-a3b",
    "qwen3-1.7b": "qwen3-0.6b",
    "qwen3-4b": "qwen3-8b",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
    "qwen3-coder-next": "qwen3-next-80b-a3b",
    "qwen3-vl-2b": "qwen3-0.6b",
    "qwen3-vl-30b-a3b": "qwen3-30b-a3b",
    "qwen3-vl-32b": "qwen3-32b",
    "qwen3-vl-4b": "qwen3-8b",
    "qwen3-vl-8b": "qwen3-8b",
    "qwen3.6-27b": "qwen3.5-27b",
}


def find_model(name: str, ask_hub: bool = False) -> tuple[ModelSpec, str]:
    """(the model, a doubt worth telling or nothing). Paths and shipped names are read, a repository is looked up among
    the shipped ones and in the shared cache; the Hub is asked only for a name that a user gave.
    """
    if Path(name).exists() or shipped_name(name):
        return load(name), ""
    known: dict[str, str] = {}
    for shipped, repository in shipped_repositories().items():
        for bare in (_bare(shipped), _bare(repository)):
            known.setdefault(bare, shipped)
    same_kv = {_bare(other): known[_bare(shipped)] for other, shipped in _SAME_KV.items()}
    # A path may name the model in a directory above the last one: /models/gpt-oss-120b/default/1.
    for wanted in map(_bare, (name, *reversed(name.split("/")))):
        if same := known.get(wanted) or same_kv.get(wanted):
            return load(same), f"{name} is taken to have the KV shapes of the shipped {same}"
    if (hub_name := parse_name(name)) and (cached := Hub().cached_shape(hub_name)):
        return replace(load(cached), name=name), ""
    if ask_hub and hub_name:
        return load(name), ""
    raise ModelError(
        f"the log names the model {name!r}, whose shapes are not shipped; give its directory or config.json with "
        "--model, or one of the names of `windowpane models`"
    )


def _bare(name: str) -> str:
    # A path into the Hub's cache names the repository in the directory above its snapshots.
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)", name)
    bare = (cached[2] if cached else name).lower().rstrip("/").rsplit("/", 1)[-1]
    while (shorter := _SUFFIX.sub("", bare)) != bare:
        bare = shorter
    return bare.replace(".", "-")  # Hub caches and paths write 3-1 for 3.1
