"""The house: which package of `windowpane` may import which. `HOUSE` is the one place where that is written down."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import windowpane

# Lowest first. A package imports from those that are named for it and from itself, also inside functions and for types
# only. `package.module` allows that module alone.
HOUSE: dict[str, set[str]] = {
    # without torch
    "garbage": set(),
    "kv": set(),
    "models": {"kv"},
    "schedule": {"kv"},
    "drafts": {"schedule.request"},
    "plan": {"kv", "models", "drafts.config"},
    "routing": {"kv", "schedule"},
    "simulate": {"garbage", "kv", "models", "schedule", "plan", "routing"},
    "doctor": {"kv", "models", "plan"},
    "text": {"models", "schedule.request"},
    # with torch
    "native": {"models.embedded"},
    "device": {"kv", "schedule.step"},
    "attention": {"kv", "schedule.step", "device"},
    "lowering": {"kv", "models", "schedule.step", "native", "device", "attention"},
    "weights": {"models", "native", "lowering"},
    "runners": {
        "kv",
        "models",
        "drafts.drafter",
        "schedule.batch",
        "schedule.request",
        "schedule.step",
        "device",
        "lowering",
    },
    "parallel": {
        *("kv", "models", "schedule.batch", "schedule.request", "drafts.drafter", "plan"),
        *("device", "lowering", "weights", "runners"),
    },
    "engine": {
        *("garbage", "kv", "models", "schedule", "drafts", "plan", "text"),
        *("native", "device", "lowering", "weights", "runners", "parallel"),
    },
    "measure": {"kv", "models", "schedule", "engine"},
    "server": {"kv", "schedule", "routing.events", "drafts", "text", "device.heap", "parallel", "engine"},
    "cluster": {"kv", "schedule", "routing", "text", "parallel", "engine", "server"},
    "__main__": {"cli"},
    "cli": {
        "garbage",
        "models",
        "schedule",
        "plan",
        "simulate",
        "doctor",
        "text",
        "engine",
        "measure",
        "server",
        "routing.events",
        "cluster",
    },
    "": {"schedule.request", "text", "engine"},  # `windowpane` itself: the public names
}

WITHOUT_TORCH = ("kv", "models", "schedule", "drafts", "plan", "routing", "simulate", "doctor", "text")

ROOT = Path(windowpane.__file__).parent


def modules() -> dict[str, Path]:
    """Every module by its name below `windowpane`; a package has the name of its directory."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
        for path in sorted(ROOT.rglob("*.py"))
    }


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """What a module imports, by full name, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, f"{path}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(name: str) -> set[str]:
    """Modules of `windowpane` that a module imports. The version and the place of the package are anybody's."""
    found = set()
    for target in imports(MODULES[name]):
        top, _, rest = target.partition(".")
        if top == "windowpane" and rest not in ("", "__version__"):
            while rest and rest not in MODULES:
                rest = rest.rpartition(".")[0]  # a name of that module
            found.add(rest)
    return found


def package(name: str) -> str:
    return name.split(".")[0]


def crossings() -> set[tuple[str, str]]:
    """Every import from one package in another."""
    return {(name, target) for name in MODULES for target in own_imports(name) if package(target) != package(name)}


def allows(arrow: str, target: str) -> bool:
    return target == arrow or target.startswith(arrow + ".")


def test_packages_import_only_what_is_below_them() -> None:
    wrong = [
        f"windowpane.{name} imports windowpane.{target}; {package(name)} may import {sorted(HOUSE[package(name)])}"
        for name, target in sorted(crossings())
        if not any(allows(arrow, target) for arrow in HOUSE[package(name)])
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_has_its_place_and_every_arrow_a_use() -> None:
    assert {package(name) for name in MODULES} == set(HOUSE)
    found = crossings()
    unused = [
        f"{one} no longer imports {arrow}: take it out"
        for one, arrows in HOUSE.items()
        for arrow in sorted(arrows)
        if not any(package(name) == one and allows(arrow, target) for name, target in found)
    ]
    assert not unused, "\n".join(unused)


def test_nothing_goes_round() -> None:
    graph = {one: {package(arrow) for arrow in arrows} for one, arrows in HOUSE.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the packages


def test_no_module_of_these_names_torch() -> None:
    naming = [
        f"windowpane.{name} imports {target}"
        for name, path in MODULES.items()
        if package(name) in WITHOUT_TORCH
        for target in imports(path)
        if target.split(".")[0] in ("torch", "triton")
    ]
    assert not naming, "\n".join(naming)


def test_importing_them_imports_no_torch() -> None:
    names = [f"windowpane.{name}" for name in MODULES if package(name) in WITHOUT_TORCH]
    script = f"import sys, {', '.join(names)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")
