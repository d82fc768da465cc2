"""`windowpane serve` that says what ran when its event loop was late: the stacks of all threads, on standard error.

    python -m bench.late serve MODEL [FLAGS]

faulthandler writes them from a thread of its own that needs no interpreter lock, so that the thread which holds it is
seen where it stands. On a busy machine this can end the process, because frames may change while they are read. Behind
each come the seconds late and the processor seconds that the process had meanwhile: where these are few, the machine
was busy with others.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import time

from windowpane.cli.main import main
from windowpane.server import service

LATE_S = 0.1


async def probe_lag(self: service.Service) -> None:
    while True:
        due = time.monotonic() + service.LAG_PROBE_S
        worked_s = time.process_time()
        faulthandler.dump_traceback_later(service.LAG_PROBE_S + LATE_S)
        await asyncio.sleep(service.LAG_PROBE_S)
        late_s = max(0.0, time.monotonic() - due)
        self.loop.metrics.loop_lag_s.observe(late_s)
        if late_s > LATE_S:
            print(f"late by {late_s:.3f} s, processor {time.process_time() - worked_s:.3f} s", file=sys.stderr)


if __name__ == "__main__":
    service.Service._probe_lag = probe_lag  # type: ignore[method-assign]
    sys.exit(main())
