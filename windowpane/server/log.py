"""One line per request: how long it queued and prefilled, what was cached, how fast it decoded."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windowpane.server.job import Job


TRACE = 5  # uvicorn's, below debug


def set_up(level: str = "info", uvicorn_level: str = "warning") -> None:
    """Write the server's log to stderr, and uvicorn's own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logging.addLevelName(TRACE, "TRACE")
    for name, chosen in (("windowpane", level), ("uvicorn", uvicorn_level)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(chosen.upper())
        logger.propagate = False


class _Printable(logging.Formatter):
    """Paths and names come from strangers: what would steer a terminal is shown as what it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        message = super().formatMessage(record)
        return message if message.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)


def log_job(log: logging.Logger, job: Job) -> None:
    if log.isEnabledFor(logging.INFO):
        log.info("%s", describe(job))


def describe(job: Job) -> str:
    """Of several choices, the queue and prefill of the slowest, and the tokens of all together."""
    requests, times = job.requests, job.times
    prompts = {id(request.prompt): request for request in requests}.values()  # choices share their prompt's array
    cached = sum(request.cached_tokens for request in prompts)
    new = sum(len(request.prompt) for request in prompts) - cached
    generated = sum(len(request.output) for request in requests)
    # Who leaves the queue is told to the engine's thread, which has not ended it yet.
    queue = max(((t.admitted or t.ended or time.monotonic()) - t.submitted for t in times), default=0.0)
    prefill = max((t.first_token - t.admitted for t in times if t.first_token and t.admitted), default=0.0)
    first = min((t.first_token for t in times if t.first_token), default=0.0)
    last = max((t.last_token for t in times if t.last_token), default=0.0)
    after_first = generated - sum(t.first_token is not None for t in times)
    speed = f"{after_first / (last - first):.1f} tok/s" if last > first and after_first else "- tok/s"
    reasons = ["client gone"] if job.client_gone else sorted({_reason(a.finish_reason) for a in job.answers})
    who = f", user {job.user!r}" if job.user else ""
    misses = sorted({request.cache_miss for request in prompts if request.cache_miss})
    why = f" ({'; '.join(misses)})" if misses and not cached else ""
    return (
        f"{job.id} {','.join(reasons)}: queue {queue:.3f} s, prefill {prefill:.3f} s, "
        f"{cached} cached + {new} new tokens{why}, {generated} generated, {speed}{who}"
    )


def _reason(reason: object) -> str:
    return getattr(reason, "value", "abort")
