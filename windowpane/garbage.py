"""When not to look for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected(*, freeze: bool = False) -> Iterator[None]:
    """For work that makes many objects, nearly all of which stay: looking for garbage among them takes a tenth of its
    time. With `freeze` they are not looked at later either, which suits a process that is ours alone.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        if was_enabled:
            gc.enable()
