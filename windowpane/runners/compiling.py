"""Compiling the kernels of a step side by side, before anything is launched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton.runtime._async_compile import AsyncCompileMode, FutureKernel, active_mode
from triton.runtime.jit import JITFunction

MOST_THREADS = 16


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Within it, kernels are compiled by threads and not launched; at its end all of them are there.

    One after the other, those of a model take most of a first start-up. Results are whatever memory held before, so
    nothing within may go by them, which holds for all that a graph can capture.
    """
    launch = JITFunction.run

    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if isinstance(kernel, FutureKernel) and kernel.future.done():
            kernel.result()  # from now on it is found at once
        return kernel

    threads = min(MOST_THREADS, os.cpu_count() or 1)
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool, AsyncCompileMode(pool):
            JITFunction.run = compile_only
            try:
                yield
            finally:
                JITFunction.run = launch
    finally:
        active_mode.set(None)  # which it does not do itself where a kernel does not compile
