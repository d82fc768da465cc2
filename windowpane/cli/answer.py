"""An answer on the terminal, as it comes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from windowpane.cli.errors import UserError

if TYPE_CHECKING:
    from windowpane.engine.llm import Stream


def show(stream: Stream) -> None:
    """Print an answer as it comes; an interrupt ends the answer, not the program."""
    from windowpane.text.answer import RequestFailed

    try:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.close()
    except RequestFailed as error:
        raise UserError(error) from error
    sys.stdout.write("\n")
    sys.stdout.flush()
