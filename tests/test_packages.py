"""The sdist and the wheel that `python -m build` makes: they hold what the package needs, install and run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from windowpane import __version__

ROOT = Path(__file__).parents[1]
NEEDED = ("windowpane", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
MADE_LATER = shutil.ignore_patterns("__pycache__", "prebuilt")
PARIS = "The capital of France is"

pytestmark = pytest.mark.xdist_group("packages")  # built once


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m build` leaves: an sdist, and the wheel that is made of the sdist and not of the tree."""
    tree = tmp_path_factory.mktemp("tree")
    for name in NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name, **({"ignore": MADE_LATER} if (ROOT / name).is_dir() else {}))
    _run(sys.executable, "-m", "build", "--no-isolation", str(tree))
    return tree / "dist"


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with the wheel in it, which borrows the packages that the wheel depends on."""
    home = tmp_path_factory.mktemp("installed")
    _run(sys.executable, "-m", "venv", "--without-pip", str(home))
    python = home / "bin" / "python"
    wheel = dist / f"windowpane-{__version__}-py3-none-any.whl"
    _run(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    site = Path(_run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A path alone: the .pth files of the borrowed directory, with which this tree is installed, are not read.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    assert _run(str(python), "-c", "import windowpane; print(windowpane.__file__)").startswith(str(site))
    return home / "bin"


def test_both_hold_every_file_of_the_package_and_no_tests(dist: Path) -> None:
    tree = {str(path.relative_to(dist.parent)) for path in (dist.parent / "windowpane").rglob("*") if path.is_file()}
    assert "windowpane/server/page/index.html" in tree and "windowpane/native/kernels.h" in tree
    with zipfile.ZipFile(dist / f"windowpane-{__version__}-py3-none-any.whl") as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == tree
    name = f"windowpane-{__version__}"
    with tarfile.open(dist / f"{name}.tar.gz") as sdist:
        files = {member.name.removeprefix(f"{name}/") for member in sdist if member.isfile()}
    outside = {file for file in files if not file.startswith(("windowpane/", "windowpane.egg-info/"))}
    assert {file for file in files if file.startswith("windowpane/")} == tree
    assert outside == {*NEEDED, "PKG-INFO", "setup.cfg"} - {"windowpane"}


def test_an_installed_wheel_plans_and_has_the_server(installed: Path) -> None:
    assert "6 sequences of 262,144 tokens" in _run(
        str(installed / "windowpane"), "plan", "gemma-4-31b", "--gpu", "h200"
    )
    load = "from windowpane.server import app, page, run; print([r.path for r in page.router().routes])"
    assert _run(str(installed / "python"), "-c", load).strip() == "['/', '/page/{name}']"


def test_an_installed_wheel_without_kernels_and_compiler_generates(installed: Path) -> None:
    flags = ["--prompt", PARIS, "--temperature", "0", "--max-tokens", "5", "--max-model-len", "256"]
    said = _run(str(installed / "windowpane"), "generate", *flags, PATH=str(installed))
    assert "the capital of the country" in said


def _run(*command: str, **environment: str) -> str:
    """What a command prints, run elsewhere than here, so that nothing is found because it lies in this tree."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=Path(sys.prefix), env=inherited | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
