"""What happened lately, request by request: how each ended, who was refused, and who was sent back to the queue.

Requests and preemptions are told by the engine's thread, refusals by the event loop: appending is all that both do. No
text of prompts or answers is kept.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from windowpane.schedule.request import FinishReason, Request
from windowpane.server.job import Times

KEPT = 200  # entries; older ones give way


class Journal:
    def __init__(self) -> None:
        self.noted = 0  # entries ever, about: two threads count
        self._entries: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def ended(self, request: Request, reason: FinishReason | None, times: Times) -> None:
        self._note((reason or FinishReason.CANCELLED).value, request.id, life(request, times), error=_named(request))

    def preempted(self, request: Request) -> None:
        self._note("preempted", request.id, None)

    def refused(self, where: str, why: str) -> None:
        self._note("refused", where, None, error=why)

    def document(self) -> list[dict[str, Any]]:
        """The latest first."""
        return list(self._entries)[::-1]

    def _note(self, what: str, id: str, its_life: dict[str, Any] | None, error: str | None = None) -> None:
        self.noted += 1
        self._entries.append({"at": round(time.time(), 1), "what": what, "id": id, "error": error, "life": its_life})


def life(request: Request, times: Times | None) -> dict[str, Any]:
    """Where a request's time and tokens went so far. A part that has not begun is null."""
    now = time.monotonic()
    submitted, admitted, first, ended = (
        (None, None, None, None) if times is None else (times.submitted, times.admitted, times.first_token, times.ended)
    )
    return {
        "queued_s": _seconds(submitted, admitted or ended or now),
        "prefilled_s": _seconds(admitted, first or ended or now),
        "decoded_s": _seconds(first, ended or now),
        "prompt_tokens": len(request.prompt),
        "cached_tokens": request.cached_tokens,
        "output_tokens": len(request.output),
        "drafted_tokens": request.drafted_tokens,
        "accepted_tokens": request.accepted_tokens,
        "preemptions": request.preemptions,
    }


def _seconds(start: float | None, stop: float) -> float | None:
    return None if start is None else round(max(0.0, stop - start), 3)


def _named(request: Request) -> str | None:
    """What kind of error ended it. Its message is in the answer and the log."""
    return None if request.error is None else type(request.error).__name__
