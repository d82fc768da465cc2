"""Whether there are kernels to test: without a compiler there are none, and a compiler that gives none is a failure."""

from __future__ import annotations

import ctypes

import pytest

from windowpane.native import build

# What `build.why_not` says where nothing was tried.
NOTHING_TRIED = ("turns them off", "none for ", "no C compiler")


def compiled_library() -> ctypes.CDLL:
    library, why = build.library(), str(build.why_not())
    if library is None and any(words in why for words in NOTHING_TRIED):
        pytest.skip(f"no kernels here: {why}")
    if library is None:
        pytest.fail(why)
    return library
