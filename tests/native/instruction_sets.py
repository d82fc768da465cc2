"""Which instruction sets kernels are written for, and which of them this machine runs or can only compile."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

# Compiler flags by machine, with what /proc/cpuinfo lists where a processor has the set.
SETS: dict[str, dict[str, set[str]]] = {
    "x86_64": {
        "-march=x86-64": set(),
        "-march=haswell": {"avx2", "fma", "f16c", "bmi2"},
        "-march=alderlake": {"avx_vnni", "avx2", "gfni", "movdiri"},
        "-march=x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
        "-march=cascadelake": {"avx512_vnni", "avx512bw", "avx512vl", "avx512cd", "avx512dq"},
    },
    "aarch64": {"-march=armv8-a": set(), "-march=armv8.2-a+dotprod": {"asimddp"}},
}


def _features() -> set[str]:
    path = Path("/proc/cpuinfo")
    return set(path.read_text().split()) if path.exists() else set()


def runnable() -> list[str]:
    return [flag for flag, needs in SETS.get(platform.machine(), {}).items() if needs <= _features()]


def compiled_only() -> list[tuple[str, str]]:
    """Compiler and flag of the others, where there is a compiler for their machine."""
    own = platform.machine()
    compilers = {m: shutil.which("gcc" if m == own else f"{m}-linux-gnu-gcc") for m in SETS}
    runs = runnable()
    return [(cc, flag) for m, flags in SETS.items() if (cc := compilers[m]) for flag in flags if flag not in runs]


def summary() -> str:
    """One line for the report: nothing is left out silently."""
    runs, compiles = runnable(), [flag for _, flag in compiled_only()]
    neither = [flag for flags in SETS.values() for flag in flags if flag not in (*runs, *compiles)]
    parts = (("run", runs), ("compiled only", compiles), ("not compiled, no compiler for them", neither))
    return "kernels: " + "; ".join(f"{words}: {' '.join(flags)}" for words, flags in parts if flags)
