"""How the compiled kernels are called: functions with their argument types, and tensors by address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_long

import torch


def function(library: ctypes.CDLL, name: str, *arguments: type) -> Callable[..., None]:
    found = getattr(library, name)
    found.argtypes, found.restype = arguments, None
    return found  # type: ignore[no-any-return]


def count(library: ctypes.CDLL, name: str, *arguments: type) -> Callable[..., int]:
    found = getattr(library, name)
    found.argtypes, found.restype = arguments, c_long
    return found  # type: ignore[no-any-return]


def address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
