"""Builds the C sources beside it once per machine, keeps the library in the user's cache, and loads it. Without a
compiler, what a wheel carries for this kind of processor is taken.

Everything the result depends on is in the file's name: source, flags, compiler, processor and torch. So a library is
never taken for another's, and one that is there is whole: it is written beside and then renamed. Without a compiler and
a wheel, or where anything fails, there are no kernels, `why_not` says why, and torch does the work.

`WINDOWPANE_CPU_KERNELS=off` leaves them out.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from windowpane.models.embedded import cache_directory
from windowpane.native.levels import FLAGS, LEVELS, LINK_FLAGS, NATIVE_FLAGS

SWITCH = "WINDOWPANE_CPU_KERNELS"
SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
PREBUILT = Path(__file__).parent / "prebuilt"
BUILD_SECONDS = 120
_COMPILERS = ("gcc", "cc")
_SYSTEMS = {"Linux": ("aarch64", "x86_64"), "Darwin": ("arm64",)}


class NoKernels(Exception):
    """Why there are none."""


def start_building() -> None:
    """Begin in the background, so that it is done when the weights are."""
    _building()


def library() -> ctypes.CDLL | None:
    """The compiled kernels, None where there are none. Waits for the build that `start_building` began."""
    return None if why_not() else _building().result()


def why_not() -> str | None:
    """Why there are no kernels here, None where there are."""
    error = _building().exception()
    return None if error is None else str(error)


@cache
def _building() -> Future[ctypes.CDLL]:
    pool = ThreadPoolExecutor(1, "windowpane-build")
    future = pool.submit(_build)
    pool.shutdown(wait=False)
    return future


def _build() -> ctypes.CDLL:
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no"):
        raise NoKernels(f"{SWITCH} turns them off")
    if platform.machine() not in _SYSTEMS.get(platform.system(), ()):
        raise NoKernels(f"none for {platform.system()} on {platform.machine()}")
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None and not PREBUILT.is_dir():
        raise NoKernels(f"no C compiler ({' or '.join(_COMPILERS)}) is installed")
    try:
        return load_prebuilt() if compiler is None else ctypes.CDLL(str(_compiled(compiler)))
    except OSError as error:
        raise NoKernels(f"cannot build or load kernels: {error}") from error


def load_prebuilt() -> ctypes.CDLL:
    """The best that this processor has. It was linked without OpenMP, whose functions are found in what is loaded."""
    features = set(_processor().split())
    level = next(level for level in LEVELS[platform.machine()] if level.needs <= features)
    ctypes.CDLL(str(_openmp() or _openmp_name()), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(PREBUILT / f"{level.name}.so"))


def _compiled(compiler: str) -> Path:
    command = [compiler, *FLAGS, NATIVE_FLAGS[platform.machine()]]
    version = _run([compiler, "--version"])
    openmp = _openmp()
    sources = [source.read_text() for source in SOURCES]
    parts = [*sources, *command, version, _processor(), torch.__version__, str(openmp)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    directory = cache_directory() / "kernels"
    target = directory / f"{key}.so"
    if not target.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            objects = {s: f"{scratch}/{s.stem}.o" for s in SOURCES if s.suffix == ".c"}
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda source: _run([*command, "-c", str(source), "-o", objects[source]]), objects))
            linked = Path(scratch) / "kernels.so"
            library = str(openmp or f"-l{_openmp_name()[3:].split('.')[0]}")
            _run([compiler, *LINK_FLAGS, *objects.values(), "-o", str(linked), library, "-lm"])
            linked.replace(target)
    return target


def _openmp() -> Path | None:
    """torch's own OpenMP library: a second one would bring threads that get in the way of the first's."""
    home = Path(torch.__file__).parent.parent
    names = ("torch/lib/libgomp*.so*", "torch.libs/libgomp*.so*", "torch/lib/libomp*.dylib")
    return next((path for name in names for path in home.glob(name)), None)


def _openmp_name() -> str:
    return "libomp.dylib" if platform.system() == "Darwin" else "libgomp.so.1"


def _processor() -> str:
    """What this processor can do: a cache that several machines share holds a library for each kind."""
    if platform.system() == "Darwin":
        return _run(["sysctl", "-n", "machdep.cpu.brand_string"]).strip()
    wanted = ("model name", "CPU part", "CPU implementer", "flags", "Features")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in wanted}))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NoKernels(f"{command[0]} took more than {BUILD_SECONDS} seconds") from error
    if done.returncode:
        raise NoKernels(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
