"""What a machine's processor is called."""

from __future__ import annotations

import platform
from pathlib import Path

# Arm kernels name the part by number only.
ARM_PARTS = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return names.get("model name") or ARM_PARTS.get(names.get("CPU part", ""), platform.machine())
