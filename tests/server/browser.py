"""A real server in a process of its own, and a real browser to look at it with."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
START_S = 60


def chromium_path() -> str:
    for name in CHROMIUM_NAMES:
        if path := shutil.which(name):
            return path
    pytest.fail(
        f"the page is tested in a browser and none of {', '.join(CHROMIUM_NAMES)} is there: apt install chromium"
    )


class ServerProcess:
    """`windowpane serve` on one port, which it keeps when it is started again."""

    def __init__(self, model: Path | str, *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-c", "import sys; from windowpane.cli.main import main; sys.exit(main())"]
        self._command += ["serve", str(model), "--port", str(self.port), "--log-level", "warning", *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(self._command, env=environment, stderr=subprocess.PIPE)

    def wait_until_up(self) -> None:
        assert self._process is not None
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                assert self._process.stderr is not None
                pytest.fail(f"the server ended at once: {self._process.stderr.read().decode()}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:  # not listening yet, or listening while the model loads
                time.sleep(0.1)
        pytest.fail(f"the server did not answer within {START_S} s")

    def stop(self) -> int:
        """Let it finish what it does; returns its exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(START_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code

    def ask(self, path: str, body: dict[str, Any] | None = None, key: str = "") -> Any:
        with self._open(path, body, key) as answer:
            return json.load(answer)

    def lines(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """An answer as it comes. Who stops reading hangs up."""
        with self._open(path, body, "") as answer:
            yield from answer

    def _open(self, path: str, body: dict[str, Any] | None, key: str) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=START_S)


@contextmanager
def serving(*servers: ServerProcess) -> Iterator[None]:
    """All of them started together, and stopped at the end."""
    for server in servers:
        server.start()
    try:
        for server in servers:
            server.wait_until_up()
        yield
    finally:
        for server in servers:
            server.stop()
