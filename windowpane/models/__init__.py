"""Models by name or config: `load` returns a `ModelSpec`; `windowpane.models.weights` counts its bytes."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from windowpane.models.config import CONFIG, QUANT_CONFIG, Config, ModelError
from windowpane.models.gguf import is_gguf, read_header, shards
from windowpane.models.gguf_families import hf_config, stored_types
from windowpane.models.modelopt import unmatched_target
from windowpane.models.quantization import Quantization
from windowpane.models.spec import ModelSpec

__all__ = ["ModelError", "ModelSpec", "from_config", "load", "shipped_name", "shipped_names", "shipped_repositories"]

# One module each, with `ARCHITECTURES` and `read`.
FAMILIES = (
    "cohere2",
    "deepseek",
    "ernie4_5",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_assistant",
    "glm4_moe",
    "gpt_oss",
    "granite_hybrid",
    "hunyuan",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama",
    "llama4",
    "mimo_v2",
    "minimax_m3",
    "mistral",
    "mixtral",
    "nemotron_h",
    "nemotron_nas",
    "olmo3",
    "phi3",
    "qwen3",
    "qwen3_next",
    "recurrent_gemma",
    "step3",
    "whisper",
    "zamba2",
)

# Known by name, and refused: what their layers keep is none of the retentions, so no figure here would be true.
REFUSED = {
    "DeepseekV4ForCausalLM": "beside a window of 128 tokens its layers keep one compressed entry for every 4 or 128 "
    "tokens, which is neither every token nor a fixed number of them",
}

# difflib's ratio from which on a name is suggested: Qwen2Moe has 0.88 with Qwen3Moe, and Mamba2 0.83 with Zamba2.
NEAR = 0.85

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
        return _read(path / CONFIG, path.resolve().name)
    if is_file and is_gguf(path):
        return _read_gguf(path)
    if is_file:
        # A bare config.json takes the name of the model's directory.
        return _read(path, path.resolve().parent.name if path.name == CONFIG else path.stem)
    if revision is None and (shipped := shipped_name(str(source))):
        return _read_shipped(shipped)
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


def _number_or_object(fields: dict[str, Any]) -> Any:
    """transformers 5 saves numbers that JSON has no word for as `{"__float__": "Infinity"}`."""
    tag = fields.get("__float__")
    return float(tag) if len(fields) == 1 and tag in ("Infinity", "-Infinity", "NaN") else fields


def _read_json(path: Path, name: str) -> dict[str, object]:
    """The object in a JSON file of the model `name`; a byte-order mark, which some editors write, is passed over."""
    try:
        raw = path.read_bytes()
        fields = json.loads(raw.decode("utf-8-sig"), object_hook=_number_or_object)
    except FileNotFoundError:
        raise ModelError(f"{path.parent} holds no {path.name}") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    except UnicodeDecodeError as error:
        is_utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        why = "it is UTF-16" if is_utf16 else f"it is not UTF-8 ({error.reason} at byte {error.start})"
        raise ModelError(f"cannot read {path}: {why}; save it again as UTF-8") from None
    except (ValueError, RecursionError) as error:
        if b"\0" in raw[:4]:
            raise ModelError(f"cannot read {path}: it is UTF-16; save it again as UTF-8") from None
        why = str(error).partition(";")[0]  # what follows is for programmers
        raise ModelError(f"the config of {name} is not valid JSON: {why}") from None
    if not isinstance(fields, dict):
        raise ModelError(f"the config of {name} must be a JSON object, not {type(fields).__name__}")
    return fields


def _read_gguf(path: Path) -> ModelSpec:
    header = read_header(path)
    size = sum(file.stat().st_size for file in shards(path)) / 2**30
    note = f"the GGUF model has {size:.2f} GiB; CPUs run it as it is stored, GPUs with --dtype"
    spec = from_config(hf_config(header), path.stem)
    return replace(spec, quantization=stored_types(header), notes=(*spec.notes, note))


def _read(path: Path, name: str) -> ModelSpec:
    fields, beside = _read_json(path, name), path.with_name(QUANT_CONFIG)
    if path.name == CONFIG and beside.is_file():
        fields = _with_quantization(fields, _read_json(beside, name))
    return from_config(fields, name)


@cache
def _read_shipped(name: str) -> ModelSpec:
    """Read once: nobody changes a spec."""
    return _read(_SHIPPED / f"{name}.json", name)


def _with_quantization(fields: dict[str, object], beside: dict[str, object]) -> dict[str, object]:
    """ModelOpt writes how weights are stored into a file of its own, and newer releases into config.json too."""
    own = fields.get("quantization_config")
    if own is None:
        return {**fields, "quantization_config": {"quant_method": "modelopt", **beside}}
    method = own.get("quant_method") if isinstance(own, dict) else None
    if not str(method).startswith("modelopt"):
        raise ModelError(
            f"{CONFIG} says that weights are stored as {method!r:.40}, and {QUANT_CONFIG} beside it that ModelOpt "
            "stored them; remove the one that is out of date"
        )
    return fields


def from_config(fields: Mapping[str, object], name: str) -> ModelSpec:
    """Read a model from the fields of a config in Hugging Face form."""
    config = Config(fields)
    architectures = config.texts("architectures")
    if not architectures:
        named = str(config.fields.get("model_type", name))
        raise ModelError(f"the config of {name} names no architectures; {_instead(named, config, name)}")
    if architectures[0] in REFUSED:
        raise ModelError(f"{name} ({architectures[0]}) cannot be planned: {REFUSED[architectures[0]]}")
    reader = _reader(architectures[0])
    if reader is None:
        raise ModelError(f"unknown architecture {architectures[0]!r}; {_instead(architectures[0], config, name)}")
    spec = reader(config, name)
    _check_quantization(spec)
    return spec


def _check_quantization(spec: ModelSpec) -> None:
    """Refuse a quantization that passes the model by: its weights would be counted as if there were none."""
    quantization = spec.quantization
    if not isinstance(quantization, Quantization):
        return
    quantized = [tensor for tensor in spec.tensors if tensor.tower is None and quantization.format_of(tensor)]
    if not quantized:
        raise ModelError(f"quantization_config ({quantization.method}) fits no weight of {spec.name} by its name")
    if quantization.method == "modelopt":
        modules = [tensor.module for tensor in spec.tensors if tensor.linear]
        if (target := unmatched_target(quantization, modules, spec.num_layers)) is not None:
            raise ModelError(f"quantization_config names {target}, which {spec.name} does not have")


def _reader(architecture: str) -> Callable[[Config, str], ModelSpec] | None:
    """The reader of an architecture. Families whose name it bears are imported first: one is as a rule enough."""
    squeezed = architecture.lower().replace("_", "")
    for family in sorted(FAMILIES, key=lambda name: not squeezed.startswith(name.replace("_", ""))):
        module = import_module(f"windowpane.models.families.{family}")
        if architecture in module.ARCHITECTURES:
            read: Callable[[Config, str], ModelSpec] = module.read
            return read
    return None


_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_ENDING = re.compile(r"(For[A-Z]\w*|_text|(Text)?Model)$")


def _instead(wanted: str, config: Config, name: str) -> str:
    """What can be read where this architecture cannot: the model's text part, architectures of nearly this name."""
    from difflib import get_close_matches  # only here: a model that is found does not pay for it

    modules = (import_module(f"windowpane.models.families.{family}") for family in FAMILIES)
    known: dict[str, list[str]] = {}
    for architecture in (architecture for module in modules for architecture in module.ARCHITECTURES):
        known.setdefault(_stem(architecture), []).append(architecture)
    # A model whose own name is only misspelt or missing is read whole.
    for key in () if _stem(wanted) in known else _TEXT_PARTS:
        part = config.fields.get(key)
        if isinstance(part, dict) and (architecture := _readable_part(part, known, name)):
            stored = " and the quantization_config" if config.has("quantization_config") else ""
            return (
                f"its text model alone can be planned: save {key} as a config.json of its own, with "
                f'"architectures": ["{architecture}"]{stored} in it'
            )
    count = sum(map(len, known.values()))
    close = get_close_matches(_stem(wanted), known, n=4, cutoff=NEAR)
    if not close:
        return (
            f"none of {count} known ones has a name near {wanted}, and other families cannot be planned; "
            "`windowpane models` lists models that can"
        )
    nearest = [architecture for stem in close for architecture in known[stem]]
    return f"of {count} known ones the nearest {'are' if len(nearest) > 1 else 'is'} {', '.join(nearest)}"


def _stem(architecture: str) -> str:
    """What tells an architecture or a `model_type` from others: its name without the ending that many share."""
    return _ENDING.sub("", architecture).replace("_", "").lower()


def _readable_part(part: dict[str, object], known: Mapping[str, list[str]], name: str) -> str | None:
    """The known architecture of a part of a config, by its own word or its `model_type`, if it can be read as that."""
    own = part.get("architectures")
    named = own if isinstance(own, list) else [part.get("model_type")]
    for architecture in (found for word in named for found in known.get(_stem(str(word)), [])):
        try:
            return from_config({**part, "architectures": [architecture]}, name).architecture
        except ModelError:
            continue
    return None


def _not_found(source: str) -> str:
    from difflib import get_close_matches  # only here: a model that is found does not pay for it

    close = get_close_matches(source.lower().rsplit("/", 1)[-1], shipped_names(), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return (
        f"no model directory, config.json, GGUF file or shipped model {source!r}{hint} "
        "(`windowpane models` lists shipped names)"
    )
