"""One line that says where a benchmark ran."""

from __future__ import annotations

import os
import platform

from windowpane.measure.machine import cpu_name


def machine_line() -> str:
    return f"{cpu_name()} × {os.cpu_count()}, Python {platform.python_version()}"
