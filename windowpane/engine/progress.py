"""What a terminal shows while start-up takes its time: a spinner or a bar. Nothing is drawn where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def busy(console: Console | None, what: str) -> AbstractContextManager[object]:
    """A spinner beside what may take a second or two."""
    return nullcontext() if console is None or not console.is_terminal else console.status(what)


@contextmanager
def progress_bar(
    console: Console | None, what: str, *, bytes_unit: bool = True
) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar that goes away when it is done; nothing where there is no terminal to draw it on."""
    if console is None or not console.is_terminal:
        yield None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    amount = DownloadColumn(binary_units=True) if bytes_unit else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda name, done, total: bar.update(task, completed=done, total=total)
