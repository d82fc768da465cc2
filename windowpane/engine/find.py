"""Which model is meant: a path, an embedded model or a shipped shape; and where its tokenizer lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from windowpane.drafts.config import DraftConfig
from windowpane.engine.options import StartOptions
from windowpane.models import load, shipped_repositories
from windowpane.models.drafters import drafter_for
from windowpane.models.embedded import DEFAULT_GENERATE, EMBEDDED, embedded_path
from windowpane.models.gguf import is_gguf
from windowpane.models.hub import Hub, parse_name
from windowpane.models.spec import ModelSpec
from windowpane.plan.config import ConfigError


def find_model(model: str | Path | None, options: StartOptions) -> tuple[ModelSpec, Path | None]:
    """The shape of a model, and where it lies: None for a shape without weights. No model is the embedded default; a
    name on the Hub is fetched.
    """
    spec, source = _find(model, options)
    _check_quantization(spec, options.quantization)
    return spec, source


def _check_quantization(spec: ModelSpec, asked: str | None) -> None:
    """vLLM names kernels too (`awq_marlin`); here the checkpoint's own config decides, and must agree."""
    if asked is None:
        return
    stored = None if spec.quantization is None else spec.quantization.method
    method = asked.lower().replace("_", "-").removesuffix("-marlin")
    if method != stored:
        is_stored = "is not quantized" if stored is None else f"is quantized by {stored}"
        raise ConfigError(
            f"--quantization {asked}: the checkpoint of {spec.name} {is_stored}, and weights are run as they are "
            "stored; leave it out, or give a checkpoint that is quantized so"
        )


def _find(model: str | Path | None, options: StartOptions) -> tuple[ModelSpec, Path | None]:
    name = DEFAULT_GENERATE if model is None else str(model)
    path = Path(name)
    if path.exists():
        spec = load(path)
        return (spec.expanded() if options.load_format == "dummy" and is_gguf(path) else spec), path
    if options.load_format == "dummy":
        return load(name, revision=options.revision, download_dir=options.download_dir), None
    if name in EMBEDDED:
        embedded = embedded_path(name)
        return replace(load(embedded), name=name), embedded
    if hub_name := parse_name(name):
        fetched = Hub(revision=options.revision, cache_dir=options.download_dir).model(hub_name)
        return replace(load(fetched), name=name), fetched
    spec = load(name)
    raise ConfigError(
        f"{spec.name} is a shape without weights; give its directory or a GGUF file, its name on the Hub "
        f"({shipped_repositories()[spec.name]}), or --load-format dummy for random weights"
    )


def find_drafter(spec: ModelSpec, config: DraftConfig | None, options: StartOptions) -> tuple[ModelSpec, Path | None]:
    """The model with its drafter, where that is a model, and where a drafter with a checkpoint of its own lies."""
    if config is None or config.method == "ngram":
        return spec, None
    model, source = (None, None) if config.model is None else _find(config.model, options)
    return spec.with_drafter(drafter_for(spec, model)), source


def text_source(source: Path | None) -> Path | None:
    """Where the tokenizer of the model at `source` lies, if it has one."""
    has_one = source is not None and (is_gguf(source) or (source / "tokenizer.json").is_file())
    return source if has_one else None
