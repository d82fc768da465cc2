"""Three replicas on a real Ray of this machine, behind the server's own application, and the `openai` client before it.

What a replica is and does beside a plain server is tested here; the API itself is the same code as in tests/server.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest
from playwright.sync_api import expect, sync_playwright

from tests.cluster.conftest import REPLICAS, SEEDED, Replicas
from tests.server.browser import CHROMIUM_FLAGS, chromium_path
from tests.server.harness import Running, running
from windowpane.cluster import published
from windowpane.cluster.serve import deploy
from windowpane.routing.digest import Digest, Load
from windowpane.schedule.request import FinishReason
from windowpane.server.auth import Access
from windowpane.server.stats import SIZES

# Ray's own code warns of what it uses; ours is held to the rule everywhere else.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("ray")]

STARTS_S = 300.0  # a replica imports torch, and other tests take the cores
SYSTEM = {"role": "system", "content": "You answer briefly. " * 8}
LATEST = published.LATEST["Replica"]
ADMIN = "for tests alone"
PAGE_MS = 20_000  # a browser beside Ray takes its time


@pytest.fixture(scope="module")
def cluster(replicas: Replicas) -> Iterator[Running]:
    with replicas.served(access=Access(admin_key=ADMIN)) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Iterator[Running]:
    with running(tiny, flags=SEEDED) as server:
        yield server


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


ASKED: list[dict[str, Any]] = [
    {"messages": [user("Hello")], "max_tokens": 12},
    {"messages": [SYSTEM, user("Count")], "max_tokens": 8, "logprobs": True, "top_logprobs": 2},
    {"messages": [user("Two, please")], "max_tokens": 6, "n": 2},
    {"messages": [user("Stop early")], "max_tokens": 24, "stop": ["b"]},
    {"messages": [user("Choose")], "max_tokens": 8, "extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
]


@pytest.mark.parametrize("body", ASKED, ids=["plain", "logprobs", "n", "stop", "choice"])
def test_answers_are_those_of_a_plain_server(cluster: Running, plain: Running, body: dict[str, Any]) -> None:
    answers = [s.openai.chat.completions.create(model="tiny", temperature=0, **body) for s in (cluster, plain)]
    assert [c.model_dump() for c in answers[0].choices] == [c.model_dump() for c in answers[1].choices]
    assert answers[0].usage.completion_tokens == answers[1].usage.completion_tokens
    streams = [
        list(s.openai.chat.completions.create(model="tiny", temperature=0, stream=True, **body))
        for s in (cluster, plain)
    ]
    # Tokens that come together are one piece, so pieces are put together again.
    said: list[dict[int, str]] = [{}, {}]
    for texts, pieces in zip(said, streams, strict=True):
        for choice in (c for piece in pieces for c in piece.choices):
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert said[0] == said[1]


def test_what_no_replica_could_run_is_refused_at_the_door(cluster: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024"):
        cluster.openai.chat.completions.create(model="tiny", messages=[user("x" * 4000)])


def test_a_chat_finds_what_it_said_before(cluster: Running) -> None:
    """Six chats in turn: each comes back to the replica that has its beginning."""
    chats = [[SYSTEM, user(f"{number} is my number. " * 30)] for number in range(6)]
    prompt_tokens, cached_tokens = 0, 0
    for turn in range(3):
        for messages in chats:
            answer = cluster.openai.chat.completions.create(
                model="tiny", messages=messages, max_tokens=6, temperature=0, logit_bias={"257": -100}
            )
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            if turn:
                prompt_tokens += answer.usage.prompt_tokens
                cached_tokens += answer.usage.prompt_tokens_details.cached_tokens or 0
            messages += [{"role": "assistant", "content": "fine"}, user(f"turn {turn}")]
    assert cached_tokens > 0.9 * prompt_tokens
    cluster.wait_until(lambda: len(LATEST) == REPLICAS, "all have published")
    others = count(6)

    def all_have_had_some() -> bool:
        """Of new chats each replica gets its share, sooner or later: the router looks at two by chance."""
        messages = [user(f"{next(others)} is another number. " * 30)]
        cluster.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        return all(s["prompt_tokens"] for s in LATEST.values())

    cluster.wait_until(all_have_had_some, "every replica has had some")
    shown = cluster.http.get("/metrics").text
    assert shown.count("windowpane:replica_prefixes{") == REPLICAS
    assert 'windowpane:replicas{model_name="tiny"} 3.0' in shown


def test_many_turns_within_a_second_go_where_the_first_went(cluster: Running) -> None:
    """Before a digest says that they have ended."""
    messages = [SYSTEM, user("a short question about a long text. " * 20)]
    found = []
    for _ in range(30):
        answer = cluster.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=1, temperature=0)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        found.append((answer.usage.prompt_tokens_details.cached_tokens or 0) / answer.usage.prompt_tokens)
    assert min(found[1:]) > 0.9


def test_memory_is_told_by_replica_and_in_sum_and_caches_are_dropped_everywhere(cluster: Running) -> None:
    def shown() -> dict[str, Any]:
        return dict(cluster.http.get("/stats").json())

    cluster.wait_until(lambda: all(r["arena"]["cached_bytes"] for r in shown()["replicas"]), "all keep something")
    stats = shown()
    for size in SIZES:
        assert stats["arena"][size] == sum(replica["arena"][size] for replica in stats["replicas"])
    assert stats["arena"]["map"] == [] and len(stats["replicas"]) == REPLICAS
    for replica in stats["replicas"]:
        own = cluster.http.get(f"/replicas/{replica['id']}/stats").json()["arena"]
        assert own["map"] and own["total_bytes"] == replica["arena"]["total_bytes"]
    assert cluster.http.get("/replicas/nobody/stats").status_code == 404
    headers = {"Authorization": f"Bearer {ADMIN}"}
    assert cluster.http.post("/reset_prefix_cache", headers=headers).json()["dropped_restore_points"] >= REPLICAS
    cluster.wait_until(lambda: not shown()["arena"]["cached_bytes"], "nothing is kept")
    refused = cluster.http.post("/sleep", headers=headers)
    assert refused.status_code == 400 and "windowpane deploy" in refused.json()["error"]["message"]


def test_the_page_lists_replicas_and_leads_to_each(cluster: Running) -> None:
    cluster.wait_until(lambda: len(LATEST) == REPLICAS, "every replica has published")
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium_path(), args=CHROMIUM_FLAGS) as browser,
    ):
        page = browser.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(cluster.url)
        rows, status = page.locator("#replica-rows tr"), page.get_by_role("status")
        expect(rows).to_have_count(REPLICAS, timeout=PAGE_MS)
        assert {row.get_attribute("data-id") for row in rows.all()} == set(LATEST)
        link = rows.first.get_by_role("link")
        name = link.inner_text()
        link.click()
        expect(page.locator("#model")).to_have_text(f"tiny, replica {name}", timeout=PAGE_MS)
        expect(status).to_have_text("Live", timeout=PAGE_MS)
        expect(page.locator("#replicas")).to_be_hidden()
        assert wrong == []


def test_a_client_that_leaves_ends_its_request(cluster: Running) -> None:
    stream = cluster.openai.chat.completions.create(
        model="tiny", messages=[user("Go on")], max_tokens=900, stream=True, logit_bias={"257": -100}
    )
    next(iter(stream))
    stream.close()
    cluster.wait_until(lambda: not cluster.service.loop.jobs, "the ingress has let go of it")
    time.sleep(2.5)  # digests from before are over then
    cluster.wait_until(lambda: not any(load.running for load in loads()), "no replica runs it")


def loads() -> list[Load]:
    return [Digest.unpack(stats["digest"]).load for stats in LATEST.values()]


class Asking(threading.Thread):
    """A long answer, streamed: what came, and how it ended."""

    def __init__(self, server: Running, number: int, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.server, self.number, self.max_tokens = server, number, max_tokens
        self.pieces = 0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            for piece in self.server.openai.chat.completions.create(
                model="tiny", messages=[user(f"{self.number} " * 20)], max_tokens=self.max_tokens, stream=True,
                logit_bias={"257": -100},
            ):  # fmt: skip
                self.pieces += sum(bool(choice.delta.content) for choice in piece.choices)
        except openai.APIError as error:
            self.error = error


def test_replicas_that_are_replaced_finish_what_they_have(cluster: Running, tiny: Path) -> None:
    asking = [Asking(cluster, number, 100) for number in range(9)]
    for one in asking:
        one.start()
    cluster.wait_until(lambda: all(one.pieces for one in asking), "all have begun")
    before = {stats["process_id"] for stats in LATEST.values()}
    deploy(str(tiny), {**SEEDED, "max_itl_ms": 100.0}, REPLICAS)  # another flag is another version
    for one in asking:
        one.join(STARTS_S)
    assert [(one.error, one.pieces > 0) for one in asking] == [(None, True)] * len(asking)
    cluster.wait_until(lambda: len(LATEST) == REPLICAS, "all have published")
    after = {stats["process_id"] for stats in LATEST.values()}
    assert not before & after
    deploy(str(tiny), {**SEEDED, "max_itl_ms": 100.0}, REPLICAS)  # nothing has changed: nobody is replaced
    assert {stats["process_id"] for stats in LATEST.values()} == after


def test_a_replica_that_is_killed_takes_no_request_with_it_that_had_not_begun(cluster: Running) -> None:
    """More are asked than run at once, so that some have begun and others wait when one replica is killed."""
    asking = [Asking(cluster, number, 150) for number in range(36)]
    for one in asking:
        one.start()
    cluster.wait_until(lambda: len(cluster.service.loop.jobs) == len(asking), "all have come")
    jobs = list(cluster.service.loop.jobs)
    cluster.wait_until(lambda: any(load.running for load in loads()) and any(one.pieces for one in asking), "some run")
    killed = next(s["process_id"] for s in LATEST.values() if Digest.unpack(s["digest"]).load.running)
    os.kill(killed, signal.SIGKILL)
    for one in asking:
        one.join(STARTS_S)
        assert not one.is_alive(), "a request hangs"
    lost = [one for one in asking if one.error is not None]
    assert all("the replica that ran the request is gone" in str(one.error) for one in lost)
    failed = [job.requests[0] for job in jobs if job.requests[0].finish_reason is FinishReason.FAILED]
    assert 0 < len(failed) == len(lost) < len(asking)
    assert all(request.output for request in failed), "one that had not begun was not given to another"
    assert all(len(job.requests[0].output) == 150 for job in jobs if job.requests[0] not in failed)

    def is_back() -> bool:
        return len(LATEST) == REPLICAS and all(s["process_id"] != killed for s in LATEST.values())

    cluster.wait_until(is_back, "another replica is there and has published", patience_s=STARTS_S)
