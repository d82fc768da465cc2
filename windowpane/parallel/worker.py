"""The process of a rank other than 0: `python -m windowpane.parallel.worker PIPE LIFELINE`.

It does what rank 0 says until the pipe from it ends. The lifeline is a second pipe, which carries nothing: it ends with
rank 0's process, however that goes, and then this process ends too, whatever it is waiting for.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

LOOK_AT_PARENT_S = 1.0


def main() -> None:
    pipe, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who types ^C means the engine, and that ends its ranks
    threading.Thread(target=_end_with_parent, args=(lifeline, os.getppid()), daemon=True).start()
    work(pipe)


def work(pipe: Connection) -> NoReturn:
    """Be a rank for whoever is at the other end; this process ends with it."""
    try:
        _obey(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _leave(0)  # rank 0 is done with us
    except BaseException as error:
        _tell(pipe, error)
        _leave(1)


def _obey(pipe: Connection) -> NoReturn:
    from windowpane.parallel.messages import Awake
    from windowpane.parallel.rank import Rank

    pipe.send(Awake())
    rank = Rank(pipe.recv())
    while True:
        answer = rank.do(pipe.recv())
        if answer is not None:
            pipe.send(answer)


def _end_with_parent(lifeline: int, parent: int) -> None:
    """A process that rank 0's forked may hold the lifeline open after it, so its id is looked at too."""
    while not select.select([lifeline], [], [], LOOK_AT_PARENT_S)[0] and os.getppid() == parent:
        pass
    _leave(1)


def _tell(pipe: Connection, error: BaseException) -> None:
    import torch

    from windowpane.parallel.messages import Failed

    # As everywhere here, a ValueError is what a user can mend; and so is memory that is not there.
    expected = isinstance(error, ValueError | MemoryError | torch.OutOfMemoryError)
    if not expected:
        traceback.print_exception(error)
    with suppress(OSError):
        pipe.send(Failed(str(error) if expected else f"{type(error).__name__}: {error}", expected))


def _leave(code: int) -> NoReturn:
    """At once: threads of a backend may wait for ranks that are gone."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
