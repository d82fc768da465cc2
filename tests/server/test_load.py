"""Many streams at once: each says what it says alone. `bench/server.py` measures what they cost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.streams import mixed_up
from tests.server.harness import FLAGS, Running, running
from windowpane.server import service

STREAMS, PROMPTS, TOKENS = 128, 8, 32


@pytest.fixture(scope="module")
def wide(model: Path) -> Iterator[Running]:
    with running(model, flags={**FLAGS, "max_num_seqs": 48, "kv_cache_memory_bytes": 2 * 2**20}) as server:
        yield server
        server.wait_until_idle()


def body(index: int) -> dict[str, Any]:
    """Greedy and seeded requests with prompts of several lengths."""
    sampling: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index % PROMPTS}
    return {"prompt": "window " * (1 + index % PROMPTS), "max_tokens": TOKENS, "ignore_eos": True, **sampling}


async def read(client: httpx.AsyncClient, index: int) -> str:
    text = ""
    async with client.stream("POST", "/v1/completions", json={**body(index), "stream": True}) as got:
        assert got.status_code == 200
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


def test_every_text_equals_its_solo_run(wide: Running) -> None:
    alone = [wide.complete(**body(index)).json()["choices"][0]["text"] for index in range(PROMPTS)]

    async def all_at_once() -> list[str]:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(base_url=wide.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(read(client, index) for index in range(STREAMS)))

    texts = asyncio.run(all_at_once())
    assert texts == [alone[index % PROMPTS] for index in range(STREAMS)]
    assert len(set(alone)) == PROMPTS


def test_no_more_do_those_of_every_endpoint_that_streams(wide: Running) -> None:
    """`python -m bench.streams` does the same with a thousand."""
    assert asyncio.run(mixed_up(wide.port, STREAMS)) == 0


def test_memory_is_given_back_after_requests_and_only_then(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large bodies leave holes in the C library's heap, which it would keep for as long as the server runs."""
    given_back: list[float] = []
    monkeypatch.setattr(service, "GIVE_BACK_S", 0.02)
    monkeypatch.setattr(service.heap, "give_back", lambda: given_back.append(time.monotonic()))
    with running(model) as server:
        time.sleep(0.1)
        assert not given_back, "nobody has asked for anything"
        for body in ({"prompt": "Hello", "max_tokens": 1}, {"prompt": 5}):
            before = len(given_back)
            server.complete(**body)
            server.wait_until(lambda before=before: len(given_back) > before, "answered or refused")
        time.sleep(0.1)
        assert len(given_back) <= 3
