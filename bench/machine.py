"""One line that says where a benchmark ran."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine_line() -> str:
    return f"{_cpu()} × {os.cpu_count()}, Python {platform.python_version()}"


def _cpu() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    names = {key.strip(): value.strip() for key, value in fields.items()}
    # Arm kernels name the part by number only.
    known_arm_parts = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}
    return names.get("model name") or known_arm_parts.get(names.get("CPU part", ""), platform.machine())
