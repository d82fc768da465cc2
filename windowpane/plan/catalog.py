"""`windowpane models`: the shipped shapes, a line each."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from windowpane.kv.layout import group_caches
from windowpane.models import load, shipped_names
from windowpane.models.spec import ModelSpec
from windowpane.models.weights import parameter_count
from windowpane.plan.report import print_trimmed


def print_catalog(console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("model", "parameters", "longest", "layers by what they keep"):
        table.add_column(name, justify="right" if name in ("parameters", "longest") else "left", no_wrap=True)
    for name in shipped_names():
        spec = load(name)
        billions = parameter_count(spec, towers=False) / 1e9
        table.add_row(name, f"{billions:.2f} B", f"{spec.max_position:,}", _mix(spec))
    print_trimmed(console, table)


def _mix(spec: ModelSpec) -> str:
    groups = [
        f"{len({c.layer for c in caches})} {retention.name}" for retention, caches in group_caches(spec.caches).items()
    ]
    sharing = spec.num_layers - len({c.layer for c in spec.caches})
    return " + ".join(groups) + (f", {sharing} none" if sharing else "")
