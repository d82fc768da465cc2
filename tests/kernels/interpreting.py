"""Runs checks in Triton's interpreter, in a process of its own: the interpreter is chosen when triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys


def run_interpreted(module: str, *arguments: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
