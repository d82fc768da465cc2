"""Runs checks in Triton's interpreter, which is chosen when triton is imported: in a process with TRITON_INTERPRET=1.

One such process for each test process imports torch and triton, which takes seconds, and forks for each check.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from types import SimpleNamespace

# Imported once, before any fork; none of them starts a thread.
PRELOADED = (
    "bench.gpu_checks.attention_cases",
    "bench.gpu_checks.chain",
    "bench.gpu_checks.engine",
    "tests.running.small_models",
    "windowpane.runners.cuda",
)


def run_interpreted(module: str, *arguments: str) -> None:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps([module, *arguments]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, f"the process that forks ended with {server.wait()}"
    status, told = json.loads(answer)
    assert status == 0, told[-3000:]


@cache
def _server() -> subprocess.Popen[str]:
    """Ends when its standard input closes: at the end of this process, however that comes."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.interpreting"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def _serve() -> None:
    for name in PRELOADED:
        __import__(name)
    _hasten()
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as told:
            child = os.fork()
            if child == 0:
                _run_alone(*json.loads(line), told=told.fileno())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            told.seek(0)
            print(json.dumps([status, told.read()]), flush=True)


def _hasten() -> None:
    """Leave out what the interpreter does for nothing: more than half of its time.

    It patches the language for each call of each function and restores it after each launch, though nothing here
    compiles; it makes a table of types for each value; and it computes every sum and product of integers once more, for
    an assertion that only its debug mode makes.
    """
    from triton import language
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    kept = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: kept
    assert not interpreter.interpreter_builder.options.debug
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *operands: None
    look_up, found = interpreter._get_np_dtype, {}

    def np_dtype(dtype):
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    interpreter._get_np_dtype = np_dtype


def _run_alone(module: str, *arguments: str, told: int) -> None:
    """As `python -m module arguments`, with all that it says in one file; never returns."""
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(told, stream)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        print(ending.code or "", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
