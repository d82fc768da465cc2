"""Compiling ahead, with threads that really run side by side and a launch that only counts."""

from __future__ import annotations

import threading

import pytest
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from windowpane.runners.compiling import compiling_ahead

SECONDS = 30


class Launches:
    """Stands in for `JITFunction.run`: what was compiled and what was launched, by name."""

    def __init__(self, compile_one):
        self._compile = compile_one
        self.compiled, self.launched = [], []

    def run(self, kernel, *args, grid, warmup, **options):
        if not warmup:
            self.launched.append(kernel)
            return None
        mode = _async_compile.active_mode.get()
        return mode.submit(kernel, lambda: self._compile(kernel), lambda compiled: self.compiled.append(compiled))


@pytest.fixture
def launches(monkeypatch):
    def install(compile_one):
        made = Launches(compile_one)
        monkeypatch.setattr(JITFunction, "run", lambda *args, **options: made.run(*args, **options))
        return made

    return install


def test_kernels_are_compiled_side_by_side_and_not_launched(launches, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    meet = threading.Barrier(2)

    def compile_one(kernel):
        meet.wait(SECONDS)  # neither ends before both have begun
        return kernel

    made = launches(compile_one)
    before = JITFunction.run
    with compiling_ahead():
        for kernel in ("one", "other", "one"):
            JITFunction.run(kernel, grid=(1,), warmup=False)
    assert sorted(made.compiled) == ["one", "other"] and not made.launched
    assert JITFunction.run is before
    JITFunction.run("one", grid=(1,), warmup=False)
    assert made.launched == ["one"]


def test_a_kernel_that_does_not_compile_is_told_and_launches_work_again(launches):
    def compile_one(kernel):
        raise ValueError(f"{kernel} does not compile")

    made = launches(compile_one)
    with pytest.raises(ValueError, match="bad does not compile"), compiling_ahead():
        JITFunction.run("bad", grid=(1,), warmup=False)
    JITFunction.run("good", grid=(1,), warmup=False)
    assert made.launched == ["good"] and _async_compile.active_mode.get() is None
