"""Errors that are the user's to mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """What was asked for cannot be done; the message says why, and what works."""


@contextmanager
def user_errors() -> Iterator[None]:
    """What was asked for cannot be done, or a package for it is missing: one line says so."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("windowpane"):
            raise
        raise UserError(f"running a model needs the package {error.name}: pip install {error.name}") from None
    except ValueError as error:
        raise UserError(error) from None
