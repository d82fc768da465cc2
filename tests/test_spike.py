"""The plain Triton kernels of the GPU spike, in Triton's interpreter. Gluon kernels run on a GPU only."""

from __future__ import annotations

import os
import subprocess
import sys


def test_plain_triton_kernels_agree_with_their_references_in_the_interpreter():
    """In a process of its own: the interpreter is chosen when triton is imported."""
    code = "from bench.spike.interpreter import check_interpreter; check_interpreter()"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
