"""`windowpane deploy`: models, replicas and bounds in a YAML file."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windowpane.cli.errors import UserError, user_errors
from windowpane.cli.flags import SERVER, with_flags
from windowpane.cli.serve import Asked, read_serve
from windowpane.cli.words import dashed, flag_words, read_yaml

if TYPE_CHECKING:
    from windowpane.cluster.ingress import Served

# Flags of the server that each model has for itself, and those that a file says in another way.
OF_A_MODEL = ("--served-model-name", "--lora-modules", "--lora-dir")
SAID_OTHERWISE = ("--replicas", "--ray-address", "--config")


def deploy(
    file: Annotated[str, typer.Argument(metavar="CONFIG.YAML", help="Models, replicas and flags (docs/cluster.md).")],
) -> int:
    """Serve several models with replicas on Ray, as a YAML file says, and change what runs. docs/cluster.md has it."""
    with user_errors():
        models, ray_address = read_deployment(file)
        from windowpane.cluster.ingress import deploy_models

        return deploy_models(models, ray_address)


def read_deployment(file: str) -> tuple[list[Served], str | None]:
    """What a file asks for, checked as far as it can be without a cluster."""
    document = read_yaml(file, "windowpane deploy", "`models:` to a list, and flags of the server to values")
    models = document.pop("models", None)
    ray_address = document.pop("ray-address", None)
    if not isinstance(models, list) or not models:
        raise UserError(f"{file}: `models:` is missing or no list; write `models: [{{model: NAME, replicas: 2}}]`")
    shared = _server_flags()
    if wrong := [name for name in document if f"--{name}" not in shared]:
        raise UserError(
            f"{file}: {wrong[0]!r} is no flag of the server; put flags of a model below it, in `models:`. Known here: "
            f"models, ray_address, {', '.join(sorted(name[2:].replace('-', '_') for name in shared))}"
        )
    if not isinstance(ray_address, str | None):
        raise UserError(f"{file}: ray_address is a text, as in auto or ray://head:10001")
    words = [word for name, value in document.items() for word in flag_words(name, value)]
    return [_served(file, number, entry, shared, words) for number, entry in enumerate(models, 1)], ray_address


def _served(file: str, number: int, entry: Any, shared: set[str], words: list[str]) -> Served:
    from windowpane.cluster.ingress import Served

    if not isinstance(entry, dict) or not entry.get("model"):
        raise UserError(f"{file}: model {number} of `models:` has no `model:`, a name or a path")
    given = dashed(entry)
    where = f"{file}, {given['model']}"
    model, replicas, scaling = str(given.pop("model")), given.pop("replicas", None), given.pop("autoscaling", None)
    if wrong := [name for name in given if f"--{name}" in shared]:
        raise UserError(f"{where}: {wrong[0]} holds for all models; put it at the top of the file")
    if wrong := [name for name in given if f"--{name}" in SAID_OTHERWISE]:
        raise UserError(f"{where}: {wrong[0]} stands at the top of the file, or not at all")
    if replicas is not None and scaling is not None:
        raise UserError(f"{where}: give replicas (a number) or autoscaling (bounds), not both")
    if replicas is not None and (not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1):
        raise UserError(f"{where}: replicas is a whole number from 1 on, not {replicas!r}")
    flags = [word for name, value in given.items() for word in flag_words(name, value)]
    try:
        asked = _asked([model, *words, *flags])
    except Exception as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        raise UserError(f"{where}: {' '.join(message.split())}") from None
    count = (replicas or 1) if scaling is None else _autoscaling(where, scaling)
    return Served(asked.model, asked.flags, asked.options, count)


def _autoscaling(where: str, given: Any) -> Any:
    from windowpane.cluster.autoscaling import Autoscaling

    known = {field.name: field for field in fields(Autoscaling)}
    if not isinstance(given, dict) or not {"min_replicas", "max_replicas"} <= given.keys() or given.keys() - known:
        raise UserError(f"{where}: autoscaling has min_replicas, max_replicas and some of {', '.join(list(known)[2:])}")
    for name, value in given.items():
        whole = name in ("min_replicas", "max_replicas")
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise UserError(f"{where}: autoscaling: {name} is a {'whole ' if whole else ''}number, not {value!r}")
    try:
        return Autoscaling(**given)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _parser() -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(with_flags(read_serve))
    return app


def _asked(words: list[str]) -> Asked:
    asked = _parser()(words, standalone_mode=False)
    assert isinstance(asked, Asked)
    return asked


def _server_flags() -> set[str]:
    """Those of `windowpane serve` that concern the server, whatever it serves."""
    command = typer.main.get_command(_parser())
    names = {
        option
        for parameter in command.params
        if getattr(parameter, "rich_help_panel", None) == SERVER
        for option in parameter.opts
        if option.startswith("--")
    }
    return names - {*OF_A_MODEL, *SAID_OTHERWISE}
