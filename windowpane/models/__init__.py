"""Models by name or config: `load` returns a `ModelSpec`; `windowpane.models.weights` counts its bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

from windowpane.models.config import Config, ModelError
from windowpane.models.gguf import hf_config, is_gguf, read_header, stored_types
from windowpane.models.spec import ModelSpec

__all__ = ["ModelError", "ModelSpec", "from_config", "load", "shipped_name", "shipped_names", "shipped_repositories"]

# One module each, with `ARCHITECTURES` and `read`.
FAMILIES = (
    "cohere2",
    "deepseek",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gpt_oss",
    "granite_hybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama",
    "llama4",
    "minimax_m3",
    "mistral",
    "nemotron_h",
    "olmo3",
    "phi3",
    "qwen3",
    "qwen3_next",
    "recurrent_gemma",
    "whisper",
    "zamba2",
)

# Known by name, and refused: what their layers keep is none of the retentions, so no figure here would be true.
REFUSED = {
    "DeepseekV4ForCausalLM": "beside a window of 128 tokens its layers keep one compressed entry for every 4 or 128 "
    "tokens, which is neither every token nor a fixed number of them",
}

_SHIPPED = Path(__file__).parent / "shipped"


def load(source: str | Path, *, revision: str | None = None, download_dir: str | None = None) -> ModelSpec:
    """Read a model from a directory with a config.json, a config.json itself, a GGUF file, a shipped name, or a name on
    the Hub, of which no weights are fetched. Shipped names and their repositories need no network.

    Raises ModelError where there is no such model or it cannot be read.
    """
    path = Path(source)
    try:
        is_directory, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ModelError(f"cannot read {source}: {error}") from None
    if is_directory:
        return _read(_read_file(path / "config.json"), path.resolve().name)
    if is_file and is_gguf(path):
        header = read_header(path)
        size = f"the GGUF file has {path.stat().st_size / 2**30:.2f} GiB"
        spec = replace(from_config(hf_config(header), path.stem), quantization=stored_types(header))
        return replace(
            spec,
            notes=(
                *spec.notes,
                f"{size}; CPUs run it as it is stored, GPUs with --dtype",
            ),
        )
    if is_file:
        # A bare config.json takes the name of the model's directory.
        return _read(_read_file(path), path.resolve().parent.name if path.name == "config.json" else path.stem)
    if revision is None and (shipped := shipped_name(str(source))):
        return _read(_read_file(_SHIPPED / f"{shipped}.json"), shipped)
    from windowpane.models.hub import Hub, parse_name  # only here: what lies on this disk does not pay for it

    if (wanted := parse_name(str(source))) is None:
        raise ModelError(_not_found(str(source)))
    found = load(Hub(revision=revision, cache_dir=download_dir).shape(wanted))
    return replace(found, name=str(wanted))


def shipped_names() -> list[str]:
    """The models that come with the package, sorted."""
    return sorted(path.name.removesuffix(".json") for path in _SHIPPED.glob("*.json"))


@cache
def shipped_repositories() -> dict[str, str]:
    """The repositories that the configs of shipped models came from, by the models' names."""
    abouts = {name: json.loads((_SHIPPED / f"{name}.json").read_text("utf-8")) for name in shipped_names()}
    return {name: str(about.get("_windowpane", {}).get("repository", name)) for name, about in abouts.items()}


@cache
def shipped_name(text: str) -> str | None:
    """The shipped model of this name or repository, in any case; None if there is none."""
    known = {repository.lower(): name for name, repository in shipped_repositories().items()}
    return known.get(text.lower(), text.lower() if text.lower() in shipped_names() else None)


def _read_file(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ModelError(f"{path.parent} holds no config.json") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None


def _read(text: str, name: str) -> ModelSpec:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(f"the config of {name} is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ModelError(f"the config of {name} must be a JSON object, not {type(fields).__name__}")
    return from_config(fields, name)


def from_config(fields: Mapping[str, object], name: str) -> ModelSpec:
    """Read a model from the fields of a config in Hugging Face form."""
    config = Config(fields)
    architectures = config.texts("architectures")
    if not architectures:
        raise ModelError(f"the config of {name} names no architectures; known: {', '.join(_known())}")
    if architectures[0] in REFUSED:
        raise ModelError(f"{name} ({architectures[0]}) cannot be planned: {REFUSED[architectures[0]]}")
    reader = _reader(architectures[0])
    if reader is None:
        raise ModelError(f"unknown architecture {architectures[0]!r}; known: {', '.join(_known())}")
    return reader(config, name)


def _reader(architecture: str) -> Callable[[Config, str], ModelSpec] | None:
    """The reader of an architecture. Families whose name it bears are imported first: one is as a rule enough."""
    squeezed = architecture.lower().replace("_", "")
    for family in sorted(FAMILIES, key=lambda name: not squeezed.startswith(name.replace("_", ""))):
        module = import_module(f"windowpane.models.families.{family}")
        if architecture in module.ARCHITECTURES:
            read: Callable[[Config, str], ModelSpec] = module.read
            return read
    return None


def _known() -> list[str]:
    modules = (import_module(f"windowpane.models.families.{family}") for family in FAMILIES)
    return sorted(architecture for module in modules for architecture in module.ARCHITECTURES)


def _not_found(source: str) -> str:
    from difflib import get_close_matches  # only here: a model that is found does not pay for it

    close = get_close_matches(source.lower().rsplit("/", 1)[-1], shipped_names(), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return (
        f"no model directory, config.json, GGUF file or shipped model {source!r}{hint} "
        "(`windowpane models` lists shipped names)"
    )
