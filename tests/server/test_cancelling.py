"""DELETE /requests/{id}: an answer is ended from outside, by who asked for it or by the administrator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.harness import Running, running
from tests.tiny_model import make_model
from windowpane.server.auth import Access

LONG = {"max_tokens": 480, "ignore_eos": True, "stream": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
# Path, body, and what the last event of a stream that was cancelled says.
STREAMS = [
    ("/v1/completions", {"prompt": "one", **LONG}, '"code":"request_cancelled"'),
    ("/v1/chat/completions", {**CHAT, **LONG}, '"code":"request_cancelled"'),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 480, "stream": True, "ignore_eos": True}, "cancelled"),
    ("/v1/messages", {**CHAT, "model": "tiny", "max_tokens": 480, "stream": True, "ignore_eos": True}, "cancelled"),
    ("/api/chat", {**CHAT, "model": "tiny", "options": {"num_predict": 480}}, "cancelled"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    access = Access(api_keys=("one", "two"), admin_key="admin")
    with running(make_model(tmp_path_factory.mktemp("models") / "tiny"), access=access) as up:
        yield up


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def the_only_job(server: Running) -> str:
    server.wait_until(lambda: len(server.service.loop.jobs) == 1, "a job runs")
    [job] = server.service.loop.jobs
    server.wait_until(lambda: len(job.requests[0].output) > 2, "it answers")
    return job.id


def cancel(server: Running, id: str, key: str) -> httpx.Response:
    return server.http.delete(f"/requests/{id}", headers=bearer(key))


@pytest.mark.parametrize(("path", "body", "said"), STREAMS, ids=[path for path, *_ in STREAMS])
def test_a_stream_ends_with_an_error_that_says_so(server: Running, path: str, body: dict[str, Any], said: str) -> None:
    with server.http.stream("POST", path, json=body, headers=bearer("one")) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert cancel(server, the_only_job(server), "one").json()["cancelled"] is True
        rest = "\n".join(lines)
    assert said in rest and "response.completed" not in rest and "message_stop" not in rest
    server.wait_until_idle()


def test_an_answer_that_does_not_stream_is_a_409(server: Running) -> None:
    answers: list[httpx.Response] = []
    body = {"prompt": "one", "max_tokens": 480, "ignore_eos": True}
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer("two")))
    )
    thread.start()
    id = the_only_job(server)
    assert cancel(server, f"{id}-0", "two").status_code == 200, "by the name that /stats has"
    thread.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (409, "request_cancelled")


def test_only_who_asked_or_the_administrator_may(server: Running) -> None:
    with server.http.stream("POST", "/v1/completions", json={"prompt": "one", **LONG}, headers=bearer("one")) as stream:
        id = the_only_job(server)
        assert server.http.delete(f"/requests/{id}").status_code == 401
        refused = cancel(server, id, "two")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
        assert server.service.loop.jobs
        assert cancel(server, id, "admin").status_code == 200
        assert "request_cancelled" in stream.read().decode()
    assert server.http.get("/stats", headers=bearer("admin")).status_code == 401, "it is no key to anything else"
