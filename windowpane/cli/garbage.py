"""When not to look for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Importing torch and making an engine creates a million objects, nearly all of which stay: looking for garbage
    among them takes half a second. They are not looked at later either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
