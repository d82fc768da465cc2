"""Compiles the CPU kernels into a wheel where WINDOWPANE_PREBUILT is set, as cibuildwheel does; else there is nothing
to compile, and they are built when they are first needed.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("windowpane/native")
PREBUILT = bool(os.environ.get("WINDOWPANE_PREBUILT"))


class BuildKernels(build_py):
    def run(self) -> None:
        super().run()
        if not PREBUILT:
            return
        spec = importlib.util.spec_from_file_location("levels", NATIVE / "levels.py")
        levels = sys.modules["levels"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(levels)
        target = Path(self.build_lib) / NATIVE / "prebuilt"
        target.mkdir(parents=True, exist_ok=True)
        sources = sorted(map(str, NATIVE.glob("*.c")))
        for level in levels.LEVELS[platform.machine()]:
            # OpenMP is left to be found in torch's own library: see `load_prebuilt` in build.py.
            objects = [f"{target}/{Path(source).stem}.o" for source in sources]
            for source, made in zip(sources, objects, strict=True):
                subprocess.run(["gcc", *level.flags, "-c", source, "-o", made], check=True)
            linked = f"{target}/{level.name}.so"
            subprocess.run(["gcc", *levels.LINK_FLAGS, *objects, "-o", linked, "-lm"], check=True)
            for made in objects:
                Path(made).unlink()


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """One wheel serves every Python: kernels are called by address."""
        python, abi, platform_tag = super().get_tag()
        return ("py3", "none", platform_tag) if PREBUILT else (python, abi, platform_tag)


class WithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        return PREBUILT


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": Wheel}, distclass=WithKernels)
