"""`windowpane chat` as a person meets it: the instruct model on a terminal of its own."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from windowpane.models.embedded import DEFAULT_CHAT, EmbeddedError, embedded_path

START_SECONDS, ANSWER_SECONDS = 240, 240
MARK = "› "
CTRL_C, CTRL_D = b"\x03", b"\x04"


class Terminal:
    """A chat on a pseudo-terminal. What it printed is kept, and read on from where the last wait ended."""

    def __init__(self, *arguments: str) -> None:
        self._here, there = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from windowpane.cli.main import main; main()", "chat", *arguments],
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
            preexec_fn=_own_terminal,
            env={**os.environ, "TERM": "dumb", "NO_COLOR": "1", "OMP_NUM_THREADS": "2"},
        )
        os.close(there)
        self._bytes = b""

    def type(self, keys: bytes) -> None:
        os.write(self._here, keys)

    def say(self, line: str) -> str:
        """Send a line; returns what is printed up to the next mark."""
        self.type(line.encode() + b"\n")
        self.until(re.escape(line))
        return self.until(MARK)

    def until(self, pattern: str, seconds: float = ANSWER_SECONDS) -> str:
        """What is printed before `pattern` appears."""
        deadline = time.monotonic() + seconds
        while True:
            text = self._bytes.decode(errors="replace")
            if found := re.search(pattern, text):
                self._bytes = text[found.end() :].encode()
                return text[: found.start()]
            assert time.monotonic() < deadline, f"no {pattern!r} in {text!r}"
            assert self._read(1.0), f"the chat ended before {pattern!r}: {text!r}"

    def ends(self, seconds: float = 30) -> int:
        deadline = time.monotonic() + seconds
        while self._read(0.2) and time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
        return self.process.wait(timeout=seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._here)

    def _read(self, seconds: float) -> bool:
        """Take in what is there; False where the other end has closed."""
        if not select.select([self._here], [], [], seconds)[0]:
            return True
        try:
            new = os.read(self._here, 65536)
        except OSError:  # Linux reports a closed terminal so
            return False
        self._bytes += new
        return bool(new)


def _own_terminal() -> None:
    """Keys such as Ctrl-C reach the chat only where the terminal is its own."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def chat() -> Iterator[Terminal]:
    try:
        embedded_path(DEFAULT_CHAT)
    except EmbeddedError as error:
        pytest.skip(str(error))
    terminal = Terminal("--temperature", "0", "--max-tokens", "200", "--max-model-len", "1024")
    yield terminal
    terminal.close()


def test_greeting_answers_turns_and_both_ways_out(chat: Terminal) -> None:
    greeting = chat.until(MARK, START_SECONDS)
    assert "Ctrl-C stops an answer, Ctrl-D ends the chat." in greeting

    assert "Paris" in chat.say("What is the capital of France?")
    second = chat.say("Which country did I ask about?")
    assert re.search("France|French", second), "it does not see the turn before"

    chat.type(b"Count from one to five hundred in words.\n")
    chat.until("words\\.")
    chat.until("[a-z]{3}")  # the answer has begun
    chat.type(CTRL_C)
    chat.until(MARK)
    assert chat.process.poll() is None, "Ctrl-C ends the answer, not the chat"
    assert chat.say("What is the capital of Italy?").strip(), "it answers no more"

    chat.type(CTRL_D)
    assert chat.ends() == 0
