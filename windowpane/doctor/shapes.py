"""From the name in a log to a model whose shapes are known."""

from __future__ import annotations

import json
import re
from pathlib import Path

from windowpane.models import ModelError, ModelSpec, load, shipped_names

_SHIPPED = Path(__file__).parents[1] / "models" / "shipped"
# What a repository's name adds to the shape: training stage and weight format. KV does not depend on them.
_SUFFIX = re.compile(
    r"[-_.](it|instruct|base|chat|hf|pt|fp8|nvfp4|mxfp4|bf16|awq|gptq|gguf|int4|int8|4bit|8bit|w4a16|w8a8|dynamic|qat|"
    r"autoround|quantized|w4a8|int4mix|tq|gptqmodel|mtp|text|only|awq4|thinking|reasoning|block|kv|fp8kv|\d{4})(?=[-_.]|$)"
)

# Models that are not shipped and whose layers keep what a shipped one's do.
_SAME_KV = {"qwen3.6-27b": "qwen3.5-27b"}


def find_model(name: str) -> tuple[ModelSpec, str]:
    """(the model, a doubt worth telling or nothing). Paths and shipped names are read; a repository is looked up."""
    try:
        return load(name), ""
    except ModelError:
        pass
    repositories = _repositories()
    if name.lower() in repositories:
        return load(repositories[name.lower()]), ""
    wanted = _bare(name)
    wanted = _SAME_KV.get(wanted, wanted)
    for shipped in shipped_names():
        if _bare(shipped) == wanted:
            return load(shipped), f"{name} is taken to have the KV shapes of the shipped {shipped}"
    for repository, shipped in repositories.items():
        if _bare(repository) == wanted:
            return load(shipped), f"{name} is taken to have the KV shapes of the shipped {shipped}"
    raise ModelError(
        f"the log names the model {name!r}, whose shapes are not shipped; give its directory or config.json with "
        "--model, or one of the names of `windowpane models`"
    )


def _repositories() -> dict[str, str]:
    """Shipped names by the repository their config came from, in lower case."""
    names = {}
    for shipped in shipped_names():
        about = json.loads((_SHIPPED / f"{shipped}.json").read_text("utf-8")).get("_windowpane", {})
        names[str(about.get("repository", shipped)).lower()] = shipped
    return names


def _bare(name: str) -> str:
    # A path into the Hub's cache names the repository in the directory above its snapshots.
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)", name)
    bare = (cached[2] if cached else name).lower().rstrip("/").rsplit("/", 1)[-1]
    while (shorter := _SUFFIX.sub("", bare)) != bare:
        bare = shorter
    return bare
