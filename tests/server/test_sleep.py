"""/sleep and /wake_up: memory is really given back, nobody is let in meanwhile, and answers are the same afterwards."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.harness import FLAGS, Running, running
from windowpane.server.auth import Access

ARENA_BYTES = 256 * 2**20
ADMIN = {"Authorization": "Bearer admin"}
BODY = {"prompt": "once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    flags = {
        **FLAGS,
        "kv_cache_memory_bytes": ARENA_BYTES,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }
    with running(model, flags=flags, access=Access(admin_key="admin")) as up:
        yield up


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def post(server: Running, path: str) -> httpx.Response:
    return server.http.post(path, headers=ADMIN)


def sleep_state(server: Running) -> dict[str, float]:
    found = re.findall(
        r'^vllm:engine_sleep_state{.*sleep_state="(\w+)"} (\S+)$', server.http.get("/metrics").text, re.M
    )
    return {state: float(value) for state, value in found}


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_answers_are_the_same_afterwards(server: Running, level: int) -> None:
    runner: Any = server.service.engine.runner
    before = server.complete(**BODY).json()["choices"][0]["text"]
    runner.arena.fill_(1)  # every byte of it is taken
    full, gone = resident_bytes(), weakref.ref(runner)
    del runner
    given = post(server, f"/sleep?level={level}").json()
    assert given["level"] == level and given["freed_bytes"] >= 0.99 * ARENA_BYTES
    assert full - resident_bytes() >= 0.97 * ARENA_BYTES
    gc.collect()
    assert (gone() is None) == (level == 2), "weights stay at level 1 and go at level 2"
    assert server.http.get("/is_sleeping", headers=ADMIN).json() == {"is_sleeping": True}
    assert sleep_state(server) == {"awake": 0, "weights_offloaded": level == 1, "discard_all": level == 2}
    refused = server.complete(**BODY)
    assert refused.status_code == 503 and "/wake_up" in refused.json()["error"]["message"]
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/stats").json()["arena"]["cached_bytes"] == 0
    assert post(server, f"/sleep?level={level}").json()["freed_bytes"] == 0, "it sleeps already"
    assert post(server, "/wake_up").json() == {"is_sleeping": False}
    assert sleep_state(server) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    assert server.complete(**BODY).json()["choices"][0]["text"] == before
    server.wait_until_idle()


def test_what_runs_is_answered_first(server: Running) -> None:
    given: list[httpx.Response] = []
    with server.http.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 200, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        thread = threading.Thread(target=lambda: given.append(post(server, "/sleep")))
        thread.start()
        server.wait_until(lambda: server.service.asleep, "it is on its way to sleep")
        waking = threading.Thread(target=lambda: given.append(post(server, "/wake_up")))
        waking.start()  # waits until it sleeps
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and not any("error" in line for line in rest)
    thread.join()
    waking.join()
    assert [answer.status_code for answer in given] == [200, 200]
    assert sum(answer.json().get("freed_bytes", 0) for answer in given) >= 0.99 * ARENA_BYTES, "it slept, then woke"
    assert server.complete(**BODY).status_code == 200


def test_only_the_administrator_may_and_levels_are_two(server: Running) -> None:
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        assert server.http.request(method, path).status_code == 401
    refused = post(server, "/sleep?level=3")
    assert refused.status_code == 400 and "level is 1" in refused.json()["error"]["message"]
