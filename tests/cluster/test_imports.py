"""Ray and ZeroMQ are imported by those who ask for them, and by nobody else: starting takes long enough."""

from __future__ import annotations

import subprocess
import sys

import pytest

from windowpane.cli import main as cli

PUBLISHING = '{"enable_kv_cache_events": true, "publisher": "zmq"}'


def test_a_plain_server_imports_neither_ray_nor_zeromq() -> None:
    names = (
        "windowpane, windowpane.cli.main, windowpane.server.run, windowpane.simulate.cluster, windowpane.routing.events"
    )
    script = f"import sys, {names}; print(sorted({{'ray', 'zmq', 'msgpack'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--ray-address", "auto"], "--ray-address auto is for --replicas; add that too"),
        (["--replicas", "2", "--enable-lora"], "--replicas serves models without adapters so far"),
        (["--replicas", "2", "--kv-events-config", PUBLISHING], "--replicas goes without --kv-events-config so far"),
        (["--kv-events-config", "{"], "--kv-events-config is no JSON"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_in_a_line(
    words: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["windowpane", "serve", "gemma-3-270m", *words])
    assert cli.main() == 2
    assert complaint in capsys.readouterr().err
