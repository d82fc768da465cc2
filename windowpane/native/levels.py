"""How kernels are compiled, and for which processors a wheel carries them. `setup.py` reads this file too, so it needs
nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

# Scheduling before registers are assigned spills the product's tiles; these processors reorder by themselves. For some
# (Zen, Sapphire Rapids), gcc takes chains of fused multiply-adds apart, in some loops and not in others: then a row's
# bits would depend on how many rows stand beside it.
FLAGS = ("-O2", "-std=gnu11", "-fno-schedule-insns", "-fPIC", "-fopenmp", "--param=avoid-fma-max-bits=0")


@dataclass(frozen=True)
class Level:
    """A processor has it where /proc/cpuinfo lists all that it `needs`."""

    name: str
    needs: frozenset[str]

    @property
    def flags(self) -> tuple[str, ...]:
        return (*FLAGS, f"-march={self.name}")


# The most capable first.
LEVELS: dict[str, tuple[Level, ...]] = {
    "x86_64": (
        Level("x86-64-v4", frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "f16c", "fma"})),
        Level("x86-64-v3", frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})),
        Level("x86-64", frozenset()),
    ),
    "aarch64": (Level("armv8.2-a+dotprod", frozenset({"asimddp"})), Level("armv8-a", frozenset())),
}
