"""Clients that hang up, read slowly or never read: what they held is given back. And engines that fail."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import Running, running
from windowpane.schedule.request import FinishReason
from windowpane.server import service as service_module

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 500, "ignore_eos": True, "temperature": 0}


def connect(server: Running, body: dict[str, Any], receive_bytes: int | None = None) -> socket.socket:
    """A client that has sent its request and reads nothing by itself."""
    data = json.dumps(body).encode()
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect(("127.0.0.1", server.port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return client


class TestHangingUp:
    @pytest.mark.parametrize("stream", [True, False])
    def test_pages_are_free_within_two_steps(self, server: Running, stream: bool) -> None:
        client = connect(server, {**LONG, "stream": stream})
        server.wait_until(lambda: server.live_bytes > 0, "the request runs")
        with server.engine_held():  # so that steps can be counted from the moment at which the server knows
            client.close()
            server.wait_until(lambda: not server.service.loop.jobs, "the server has noticed")
            before = server.service.loop.metrics.steps
        server.wait_until(lambda: server.live_bytes == 0, "nothing is live")
        assert server.service.loop.metrics.steps - before <= 2
        assert server.service.loop.metrics.ended_requests[FinishReason.CANCELLED] > 0

    def test_one_that_waits_leaves_the_queue(self, server: Running) -> None:
        with server.engine_held():
            connect(server, LONG).close()
            server.wait_until(lambda: not server.service.loop.jobs, "the server has noticed")

    def test_all_choices_of_a_request_end(self, server: Running) -> None:
        client = connect(server, {**LONG, "n": 4, "stream": True})
        server.wait_until(lambda: len(server.service.engine.scheduler.running) == 4, "all run")
        client.close()
        server.wait_until_idle()

    def test_others_go_on(self, server: Running) -> None:
        alone = server.complete(**{**LONG, "max_tokens": 60}).json()["choices"][0]["text"]
        leaving = [connect(server, {**LONG, "stream": True}) for _ in range(5)]
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={**LONG, "max_tokens": 60, "stream": True}
        ) as got:
            text = ""
            for line in got.iter_lines():
                if leaving:
                    leaving.pop().close()
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        assert text == alone

    def test_a_client_that_does_not_read_holds_no_pages(self, server: Running) -> None:
        wordy = {**LONG, "max_tokens": 250, "n": 8, "logprobs": 20, "stream": True}  # megabytes, beyond any buffer
        client = connect(server, wordy, receive_bytes=2048)
        server.wait_until(lambda: server.live_bytes > 0, "the request runs")
        server.wait_until(lambda: server.live_bytes == 0, "it has been computed to its end")
        client.close()
        server.wait_until_idle()

    def test_a_client_that_reads_slowly_gets_everything(self, server: Running) -> None:
        body = {**LONG, "max_tokens": 200}
        expected = server.complete(**body).json()["choices"][0]["text"]
        client = connect(server, {**body, "stream": True}, receive_bytes=2048)
        data = b""
        while b"[DONE]" not in data:
            data += client.recv(1000)
            time.sleep(0.0005)
        client.close()
        lines = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == expected

    def test_a_client_that_never_asks_hurts_nobody(self, server: Running) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
            assert server.complete(prompt="a", max_tokens=1).status_code == 200


class TestSignsOfLife:
    def test_a_stream_that_waits_long_shows_one(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(service_module, "KEEP_ALIVE_S", 0.05)
        with running(model) as server, server.engine_held():
            client = connect(server, {**LONG, "stream": True})
            data = b""
            while b"\n: " not in data:
                data += client.recv(1000)
            client.close()


class TestFailing:
    def test_a_step_that_fails_is_told_and_the_next_request_is_answered(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise RuntimeError("out of luck")

        with monkeypatch.context() as patch:
            patch.setattr(server.service.engine.runner, "forward", broken)
            answer = server.complete(prompt="a")
            assert answer.status_code == 500 and "out of luck" in answer.json()["error"]["message"]
            streamed = server.complete(prompt="a", stream=True)
            assert streamed.status_code == 200
            *_, error, done, _ = streamed.text.split("\n\n")
            assert "out of luck" in json.loads(error.removeprefix("data: "))["error"]["message"]
            assert done == "data: [DONE]"
        assert server.http.get("/health").status_code == 200
        assert server.complete(prompt="a", max_tokens=1).status_code == 200

    def test_an_engine_that_dies_is_not_healthy(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(drafts: object) -> None:
            raise AssertionError("free + used + stranded bytes are not the arena")

        with running(model) as server:
            monkeypatch.setattr(server.service.engine.scheduler, "schedule", broken)
            answer = server.complete(prompt="a")
            assert answer.status_code == 500 and "not the arena" in answer.json()["error"]["message"]
            health = server.http.get("/health")
            assert health.status_code == 503 and "not the arena" in health.json()["error"]["message"]
            assert server.complete(prompt="a").status_code == 503
            assert server.chat().status_code == 503
            assert "windowpane:engine_up{" in (text := server.http.get("/metrics").text)
            assert 'windowpane:engine_up{model_name="tiny"} 0.0' in text
            assert server.http.get("/stats").status_code == 503
