"""`windowpane models`: the shipped shapes and the shared cache of the Hub, a line each."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.table import Table

from windowpane.kv.layout import group_caches
from windowpane.models import load, shipped_repositories
from windowpane.models.hub import CachedModel, cached_models
from windowpane.models.running import why_not_run
from windowpane.models.spec import ModelSpec
from windowpane.models.weights import parameter_count
from windowpane.plan.report import print_trimmed, section
from windowpane.plan.sizes import format_bytes

SCHEMA_VERSION = 1
RUNS_NOTE = "* the engine runs these; the others can be planned"


def print_catalog(console: Console, wanted: str = "") -> None:
    """Names that contain `wanted`, in any case; all where it is empty."""
    shipped, cached = _shipped(wanted), _cached(wanted)
    if not shipped and not cached:
        console.print(f"no shipped or cached model has {wanted!r} in its name", markup=False)
        return
    parts: list[Any] = [_shapes(shipped), RUNS_NOTE] if shipped else []
    if cached:
        parts += ["", section("In the cache"), _in_cache(cached)] if parts else [_in_cache(cached)]
    print_trimmed(console, Group(*parts))


def catalog(wanted: str = "") -> dict[str, Any]:
    """The same for programs. Fields are described in docs/plan-json.md."""
    return {
        "schema_version": SCHEMA_VERSION,
        "shipped": [
            {
                "name": spec.name,
                "repository": shipped_repositories()[spec.name],
                "architecture": spec.architecture,
                "runs": _runs(spec),
                "parameters": parameter_count(spec, towers=False),
                "max_position": spec.max_position,
                "num_layers": spec.num_layers,
                "layers": {r.name: len({c.layer for c in cs}) for r, cs in group_caches(spec.caches).items()},
            }
            for spec in _shipped(wanted)
        ],
        "cached": [
            {"repository": m.repository, "size_bytes": m.size_bytes, "revisions": list(m.revisions), "path": m.path}
            for m in _cached(wanted)
        ],
    }


def _shipped(wanted: str) -> list[ModelSpec]:
    texts = {name: f"{name} {repository}".lower() for name, repository in shipped_repositories().items()}
    return [load(name) for name, text in texts.items() if wanted.lower() in text]


def _cached(wanted: str) -> list[CachedModel]:
    return [model for model in cached_models() if wanted.lower() in model.repository.lower()]


def _shapes(specs: list[ModelSpec]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("model", "parameters", "longest", "layers by what they keep"):
        table.add_column(name, justify="right" if name in ("parameters", "longest") else "left", no_wrap=True)
    for spec in specs:
        billions = parameter_count(spec, towers=False) / 1e9
        name = f"{spec.name} *" if _runs(spec) else spec.name
        table.add_row(name, f"{billions:.2f} B", f"{spec.max_position:,}", _mix(spec))
    return table


def _runs(spec: ModelSpec) -> bool:
    """Whether the engine runs it; the others are for planning."""
    return why_not_run(spec) is None


def _in_cache(models: list[CachedModel]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("on the Hub", no_wrap=True)
    table.add_column("bytes", justify="right")
    table.add_column("commits", justify="right")
    for model in models:
        table.add_row(model.repository, format_bytes(model.size_bytes), str(len(model.revisions)))
    return table


def _mix(spec: ModelSpec) -> str:
    groups = [
        f"{len({c.layer for c in caches})} {retention.name}" for retention, caches in group_caches(spec.caches).items()
    ]
    sharing = spec.num_layers - len({c.layer for c in spec.caches})
    return " + ".join(groups) + (f", {sharing} none" if sharing else "")
