"""Kernels are built once, found again, and never required."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from ctypes import c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import pytest
import torch

from windowpane.native import build
from windowpane.native.calls import function
from windowpane.native.levels import LEVELS, NATIVE_FLAGS


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a build of one source finds, as the first one of a process does."""
    one = tuple(source for source in build.SOURCES if source.name == "rows.c" or source.suffix == ".h")

    def build_with(directory: Path, **environment: str) -> str:
        with monkeypatch.context() as changed:
            for name, value in {"XDG_CACHE_HOME": str(directory), **environment}.items():
                changed.setenv(name, value)
            changed.setattr(build, "_building", cache(build._building.__wrapped__))
            changed.setattr(build, "SOURCES", one)
            return "loaded" if build.library() is not None else str(build.why_not())

    return build_with


def compiler(path: Path, script: str) -> dict[str, str]:
    path.mkdir()
    (path / "gcc").write_text(f"#!/bin/sh\n{script}\n")
    (path / "gcc").chmod(0o755)
    return {"PATH": str(path)}


def test_built_once_and_found_again(outcome, tmp_path: Path) -> None:
    first = outcome(tmp_path)
    if first != "loaded":
        pytest.skip(f"no kernels here: {first}")
    (library,) = (tmp_path / "windowpane" / "kernels").iterdir()
    written = library.stat().st_mtime_ns
    assert outcome(tmp_path) == "loaded"
    assert [p.stat().st_mtime_ns for p in library.parent.iterdir()] == [written]


def test_without_a_compiler_torch_does_the_work(outcome, tmp_path: Path) -> None:
    assert outcome(tmp_path, PATH=str(tmp_path)) == "no C compiler (gcc or cc) is installed"
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(outcome, tmp_path: Path) -> None:
    broken = compiler(tmp_path / "bin", '[ "$1" = --version ] && echo 1.0 || { echo no such header >&2; exit 1; }')
    assert outcome(tmp_path / "cache", **broken).endswith("gcc failed: no such header")
    assert list((tmp_path / "cache" / "windowpane" / "kernels").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_no_error(outcome, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot build or load kernels" in outcome(tmp_path / "file")


def test_a_switch_turns_them_off(outcome, tmp_path: Path) -> None:
    assert outcome(tmp_path, WINDOWPANE_CPU_KERNELS="off") == "WINDOWPANE_CPU_KERNELS turns them off"


def test_without_a_compiler_a_wheel_has_kernels_for_each_kind_of_processor(tmp_path: Path, monkeypatch) -> None:
    """What setup.py does for a wheel, of one source; the processor takes the first level that it has all of."""
    gcc = shutil.which("gcc")
    if gcc is None or platform.machine() not in LEVELS:
        pytest.skip("no C compiler, or no kernels for this machine")
    source = next(source for source in build.SOURCES if source.name == "rows.c")
    for level in LEVELS[platform.machine()]:
        subprocess.run([gcc, *level.flags, "-shared", source, "-o", tmp_path / f"{level.name}.so"], check=True)
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    best, *_, plainest = LEVELS[platform.machine()]
    for features, level in ((" ".join(best.needs), best), ("fpu", plainest)):
        if level == best and not best.needs <= set(build._processor().split()):
            continue
        with monkeypatch.context() as patched:
            patched.setattr(build, "_processor", lambda features=features: features)
            library = build.load_prebuilt()
        assert Path(library._name).stem == level.name
        rows, out = torch.randn(3, 100), torch.empty(3, dtype=torch.int64)
        find = function(library, "highest_places", c_void_p, c_long, c_void_p, c_long, c_long, c_int)
        find(rows.data_ptr(), 100, out.data_ptr(), 3, 100, 2)
        assert torch.equal(out, rows.argmax(dim=-1))


def test_wheels_are_configured_for_three_platforms() -> None:
    configured = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    platforms = {name.partition("-")[2] for name in configured["build"].split()}
    assert platforms == {"manylinux_x86_64", "manylinux_aarch64", "macosx_arm64"}
    # Each kind of machine has kernels in its wheel, and compiles them where there is none.
    machines = {name.split("_", 1)[1] for name in platforms}
    assert machines == set(LEVELS) == set(NATIVE_FLAGS) == {m for some in build._SYSTEMS.values() for m in some}
