"""`windowpane serve` from the command line: how it starts, what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from windowpane.cli.main import main
from windowpane.plan.config import ConfigError
from windowpane.server import run

PATIENCE_S = 60
COMMAND = [sys.executable, "-c", "import sys; from windowpane.cli.main import main; sys.exit(main())", "serve"]
SMALL = ["--load-format", "dummy", "--kv-cache-memory-bytes", "4MiB", "--max-num-seqs", "8"]
SMALL += ["--max-num-batched-tokens", "64", "--device", "cpu"]
LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 500, "ignore_eos": True, "stream": True}


class Process:
    """A server in a process of its own. `said` is what it wrote to stderr so far."""

    def __init__(self, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WINDOWPANE_API_KEY": ""}
        del environment["WINDOWPANE_API_KEY"]
        self.process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, env=environment)
        self.said = ""
        self._up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if "curl " in line:
                self._up.set()
        self._up.set()

    @property
    def url(self) -> str:
        assert self._up.wait(PATIENCE_S)
        found = re.search(r"http://127\.0\.0\.1:\d+", self.said)
        assert found, self.said
        return found[0]

    def end(self, *signals: int) -> int:
        for number in signals:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code


@contextmanager
def serving(*arguments: str) -> Iterator[Process]:
    process = Process(*arguments, "--port", "0")
    try:
        yield process
    finally:
        process.process.kill()
        process.end()


def _watch(url: str, sees: threading.Event) -> None:
    with httpx.stream("GET", f"{url}/stats", headers={"Accept": "text/event-stream"}, timeout=PATIENCE_S) as got:
        for _ in got.iter_lines():
            sees.set()


class TestEnding:
    def test_the_line_it_prints_works_and_a_signal_ends_it(self, model: Path) -> None:
        with serving(str(model), *SMALL) as server:
            url = server.url
            (line,) = re.findall(r"^  (curl .*)$", server.said, re.MULTILINE)
            answer = subprocess.run([*shlex.split(line), "-s"], capture_output=True, text=True, check=True).stdout
            assert json.loads(answer)["choices"][0]["message"]["role"] == "assistant"
            assert httpx.get(f"{url}/health").status_code == 200
            assert server.end(signal.SIGTERM) == 0
            assert "generated" in server.said and "Traceback" not in server.said

    def test_a_signal_lets_what_runs_finish_and_nobody_new_in(self, model: Path) -> None:
        with serving(str(model), *SMALL) as server:
            sees = threading.Event()
            watching = threading.Thread(target=_watch, args=(server.url, sees))  # who watches does not keep it up
            watching.start()
            assert sees.wait(PATIENCE_S)
            with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE_S) as got:
                lines = got.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                rest = list(lines)
            watching.join(PATIENCE_S)
            assert "data: [DONE]" in rest and '"finish_reason":"length"' in "".join(rest)
            assert server.end() == 0
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{server.url}/health")

    def test_a_second_one_cuts_it_off(self, model: Path) -> None:
        with serving(str(model), *SMALL) as server:
            body = {**LONG, "n": 64, "logprobs": 20}  # eight at a time: far from done when the second signal comes
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as got:
                next(got.iter_lines())
                server.process.send_signal(signal.SIGTERM)
                while "shutting down" not in server.said:
                    time.sleep(0.01)
                assert server.end(signal.SIGTERM) == 1
            assert "cut off" in server.said

    def test_so_does_the_end_of_its_patience(self, model: Path) -> None:
        with serving(str(model), *SMALL, "--shutdown-timeout", "1") as server:
            body = {**LONG, "n": 64, "logprobs": 20}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as got:
                lines = got.iter_lines()
                next(lines)
                assert server.end(signal.SIGTERM) == 1
            assert "--shutdown-timeout is over" in server.said and "Traceback" not in server.said


class TestStarting:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--api-key", ""], "--api-key is empty"),
            (["--log-level", "loud"], "use debug, info, warning, error"),
            (["--max-queue", "0"], "--max-queue"),
            (["--generation-config", "mine"], "use auto"),
            (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
            (["--max-body-bytes", "much"], "much"),
            (["--enable-auto-tool-choice"], "add --tool-call-parser"),
            (["--tool-call-parser", "nonsense"], "there are hermes"),
            (["--reasoning-parser", "nonsense"], "there are qwen3"),
            (["--chat-template", "/nowhere.jinja"], "/nowhere.jinja cannot be read"),
            (["--port", "99999"], "to 65535"),
            (["--host", "nowhere.invalid"], "cannot listen on nowhere.invalid"),
            (["--tensor-parallel-size", "3"], "works with 1, 2"),
        ],
    )
    def test_flags_that_cannot_be_honoured_are_one_line(
        self, model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["windowpane", "serve", str(model), *SMALL, "--port", "0", *arguments])
            assert main() == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said.startswith("windowpane: ") and message in said

    def test_a_port_that_is_taken_is_told_before_anything_is_loaded(self, model: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            done = subprocess.run(
                [*COMMAND, str(model), *SMALL, "--port", port], capture_output=True, text=True, timeout=PATIENCE_S
            )
        assert (done.returncode, done.stdout) == (2, "")
        assert f"port {port}" in done.stderr and "choose another with --port" in done.stderr
        assert "KV arena" not in done.stderr


@pytest.mark.parametrize(("asked", "given"), [("", 200.0), ("--max-itl-ms 50", 50.0), ("--max-itl-ms 0", 0.0)])
def test_prompts_hold_decoding_up_for_a_fifth_of_a_second_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, asked: str, given: float
) -> None:
    seen: list[dict[str, Any]] = []

    def started(_model: str | None, flags: dict[str, Any], _console: object) -> None:
        seen.append(flags)
        raise ConfigError("seen enough")

    monkeypatch.setattr(run, "start", started)
    monkeypatch.setattr(sys, "argv", ["windowpane", "serve", *SMALL, "--port", "0", *asked.split()])
    assert main() == 2
    assert [flags["max_itl_ms"] for flags in seen] == [given]


@pytest.mark.parametrize(("asked", "given"), [("", 256), ("--max-num-seqs 300", 300)])
def test_on_a_cpu_steps_are_small(monkeypatch: pytest.MonkeyPatch, asked: str, given: int) -> None:
    """A prompt of any length holds up who comes after it for one of them."""
    seen: list[dict[str, Any]] = []

    def started(_model: str | None, flags: dict[str, Any], _console: object) -> None:
        seen.append(flags)
        raise ConfigError("seen enough")

    monkeypatch.setattr(run, "start", started)
    monkeypatch.setattr(sys, "argv", ["windowpane", "serve", "--device", "cpu", "--port", "0", *asked.split()])
    assert main() == 2
    assert [flags["max_num_batched_tokens"] for flags in seen] == [given]
