"""`windowpane models`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from windowpane.cli.flags import AsJson


def models(
    wanted: Annotated[str, typer.Argument(help="Show only names with this in them.")] = "", as_json: AsJson = False
) -> None:
    """List the model shapes that are shipped, and the models of the Hub in the shared cache."""
    from windowpane.plan.catalog import catalog, print_catalog

    if as_json:
        typer.echo(json.dumps(catalog(wanted), indent=2))
        return
    from rich.console import Console

    print_catalog(Console(highlight=False), wanted)
