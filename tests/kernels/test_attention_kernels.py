"""The attention kernels in Triton's interpreter, in float32 at small sizes, against plain torch in float64.

`python3 -m bench.gpu_check` checks the same cases, compiled and at real sizes, on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHECKS = ("decode", "prefill", "chunks", "write", "programs", "lone_rows", "far_pages", "replanning")


@pytest.mark.parametrize("check", CHECKS)
def test_kernels_in_the_interpreter(check):
    """In a process of its own: the interpreter is chosen when triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.kernels.interpreted_attention", check]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
