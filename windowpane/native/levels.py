"""How kernels are compiled, and for which systems and processors a wheel carries them. `setup.py` reads this file too,
so it needs nothing but the standard library.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

_IS_MAC = platform.system() == "Darwin"

# Apple's clang compiles OpenMP only when its front end is asked, and links no library for it. Elsewhere it is GCC:
# scheduling before registers are assigned spills the product's tiles, and these processors reorder by themselves. For
# some (Zen, Sapphire Rapids) it takes chains of fused multiply-adds apart, in some loops and not in others: then the
# bits of a row would depend on how many rows stand beside it.
_GCC_FLAGS = ("-fno-schedule-insns", "-fopenmp", "--param=avoid-fma-max-bits=0")
_OWN_FLAGS = ("-Xclang", "-fopenmp") if _IS_MAC else _GCC_FLAGS
FLAGS = ("-O2", "-std=gnu11", "-fPIC", *_OWN_FLAGS)
# What a library leaves to be found in those that are loaded.
LINK_FLAGS = ("-shared", "-undefined", "dynamic_lookup") if _IS_MAC else ("-shared",)
# The processor that compiles is the one that runs.
NATIVE_FLAGS = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}


@dataclass(frozen=True)
class Level:
    """A processor has it where /proc/cpuinfo lists all that it `needs`. Macs have no such file and one level."""

    name: str
    needs: frozenset[str]

    @property
    def flags(self) -> tuple[str, ...]:
        return (*FLAGS, f"-mcpu={self.name}" if self.name.startswith("apple") else f"-march={self.name}")


# The most capable first.
LEVELS: dict[str, tuple[Level, ...]] = {
    "x86_64": (
        Level("x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "f16c", "fma"})),
        Level("x86-64-v3", frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})),
        Level("x86-64", frozenset()),
    ),
    "aarch64": (Level("armv8.2-a+dotprod", frozenset({"asimddp"})), Level("armv8-a", frozenset())),
    "arm64": (Level("apple-m1", frozenset()),),
}
