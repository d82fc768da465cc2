"""The short form of `python -m bench.fuzz`: hostile clients against a real server for a while, and nothing breaks."""

from __future__ import annotations

from pathlib import Path
from random import Random

import httpx

from bench.fuzz import Served, fuzz
from tests.server.hostile import attack

SECONDS = 20
CLIENTS = 4
SEED = 21
LAG_S = 2.5  # machines that run tests are busy: the bench command is what measures lag


def test_hostile_clients_break_nothing(tmp_path: Path) -> None:
    served = Served(tmp_path)
    try:
        routes = httpx.get(f"{served.url}/openapi.json").json()["paths"]
        findings = fuzz(served, SECONDS, CLIENTS, SEED, LAG_S)
    finally:
        code = served.stop()
    assert not findings.failures
    assert code == 0, "".join(served.said)[-3000:]
    assert findings.late == 0
    assert len(findings.gaps_s) > 20, "the victim was served"
    assert findings.statuses[200] > 10 and findings.statuses[400] > 10
    tried = {attack(Random(number)).path for number in range(5000)}
    assert {path for path in routes if "{" not in path} <= tried, "every endpoint is attacked"
