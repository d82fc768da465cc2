"""The command line. Each command imports what it needs when it runs, so that `--help` and `plan` start at once."""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from windowpane.cli.bench import bench
from windowpane.cli.chat import chat
from windowpane.cli.deploy import deploy
from windowpane.cli.doctor import doctor
from windowpane.cli.errors import UserError
from windowpane.cli.flags import with_flags
from windowpane.cli.generate import generate
from windowpane.cli.models import models
from windowpane.cli.plan import plan
from windowpane.cli.serve import serve
from windowpane.cli.simulate import simulate
from windowpane.cli.words import spelled_out


class Command(TyperCommand):
    """A command whose help shows every flag's whole name at any width, under the headings of its panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (row := parameter.get_help_record(ctx)) is not None:
                other = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or other, []).append(row)
        for name, rows in panels.items():
            with formatter.section(name):
                formatter.write_dl(rows)


class Commands(TyperGroup):
    """All commands, each with its whole sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, c.get_short_help_str(limit=500)) for name, c in found.items() if c])


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Inference for hybrid-attention models: each layer pays only for the tokens it can still see.",
)
for command in (plan, models, doctor, simulate, generate, chat, bench, serve, deploy):
    app.command(cls=Command)(with_flags(command))


def main() -> int:
    """Run what was typed and return the exit code. What cannot be honoured is one line on stderr and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without block characters shows ? instead of a traceback
    try:
        return app(spelled_out(sys.argv[1:]) or ["--help"], prog_name="windowpane", standalone_mode=False) or 0
    except Exception as error:
        message = _explain(error)
        if message is None:
            raise
        typer.echo(f"windowpane: {message}", err=True)
        return 2


def _explain(error: Exception) -> str | None:
    """One line for an error that its user can mend; None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    # A usage error. Its class is typer's own in some releases and click's in others; both have this method.
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "windowpane"
    if refused := getattr(error, "option_name", None):
        from windowpane.cli.vllm_flags import instead_of

        if (answer := instead_of(sys.argv[1:], refused)) is not None:
            return f"{answer} (see `{command} --help`)"
    return f"{' '.join(message().split())} (see `{command} --help`)"


def _print_version(wanted: bool) -> None:
    if wanted:
        from windowpane import __version__

        typer.echo(f"windowpane {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    pass
