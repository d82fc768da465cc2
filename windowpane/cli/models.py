"""`windowpane models`."""

from __future__ import annotations


def models() -> None:
    """List the model shapes that are shipped."""
    from rich.console import Console

    from windowpane.plan.catalog import print_catalog

    print_catalog(Console(highlight=False))
