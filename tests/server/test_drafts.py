"""Two servers of the same model, one of which verifies drafts, say the same over HTTP and count the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.known_drafts import Eager
from tests.running.small_models import CONFIGS
from tests.server.conftest import TEMPLATE
from tests.server.harness import FLAGS, Running, running
from tests.tiny_model import BOS, EOS, make_model
from windowpane.drafts.ngram import NgramDrafter
from windowpane.engine.options import read_flags
from windowpane.server.run import with_defaults
from windowpane.text.parsers import Parsers

DRAFTS = 4
MEMORY = 1152 * 2**10  # one sequence of 512 tokens
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"first": {"enum": ["a lot of text", "no text"]}, "second": {"enum": ["a lot of text", "no"]}},
    "required": ["first", "second"],
}
SHAPE = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 30},
    "drawn": {"temperature": 0.8, "seed": 3, "max_tokens": 30},
    "grammar": {"temperature": 0.8, "seed": 1, "max_tokens": 100, "response_format": SHAPE},
    "tool": {"temperature": 0.8, "seed": 1, "max_tokens": 200, "tools": [WEATHER], "tool_choice": "required"},
    "routes": {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "return_routed_experts": True},
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    """One without drafts and one with; sequences are promised a page at a time, so that some have to give way."""
    path: Path = make_model(tmp_path_factory.mktemp("models") / "tiny", chat_template=TEMPLATE)
    special = {"vocab_size": 258, "bos_token_id": BOS, "eos_token_id": EOS}
    (path / "config.json").write_text(json.dumps({**CONFIGS["qwen3 experts"], **special}))
    flags = {**FLAGS, "max_model_len": 512, "enable_return_routed_experts": True, "kv_cache_memory_bytes": MEMORY}
    drafts = {"method": "ngram", "num_speculative_tokens": DRAFTS}
    parsers = Parsers(None, "hermes", True)
    with (
        running(path, flags=flags, parsers=parsers) as plain,
        running(path, flags={**flags, "async_scheduling": True, "speculative_config": drafts}, parsers=parsers) as also,
    ):
        also.service.engine.speculator = Eager(NgramDrafter(3, 1), DRAFTS)
        plain.service.engine.scheduler.growth_tokens = also.service.engine.scheduler.growth_tokens = 16
        yield plain, also
        for server in (plain, also):
            server.wait_until_idle()


@pytest.mark.parametrize("kind", CHATS)
def test_answers_and_usage(servers: tuple[Running, Running], kind: str) -> None:
    plain, drafted = (server.chat("a lot of text, a lot of text", **CHATS[kind]).json() for server in servers)
    if kind == "tool":
        calls = [call for answer in (plain, drafted) for call in answer["choices"][0]["message"]["tool_calls"]]
        assert [json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo") for call in calls] == [True] * 2
        assert calls[0].pop("id") != calls[1].pop("id")
    assert drafted["choices"] == plain["choices"]
    details = drafted["usage"].pop("completion_tokens_details")
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
    plain["usage"].pop("completion_tokens_details", None)
    assert drafted["usage"] == plain["usage"]


def test_as_many_tokens_are_found_again(servers: tuple[Running, Running]) -> None:
    found = []
    for server in servers:
        first = server.chat("Tell me of the sea", temperature=0, max_tokens=40).json()
        answer = first["choices"][0]["message"]["content"]
        said = [("user", "Tell me of the sea"), ("assistant", answer), ("user", "Go on")]
        messages = [{"role": role, "content": content} for role, content in said]
        again = server.chat(messages=messages, temperature=0, max_tokens=10).json()
        found.append((again["choices"], again["usage"]["prompt_tokens_details"]["cached_tokens"]))
    assert found[0] == found[1] and found[0][1] > 0


def test_preempted_requests_say_the_same(servers: tuple[Running, Running]) -> None:
    def ask(server: Running, number: int) -> str:
        fields = {"prompt": f"Number {number}, ", "temperature": 0, "max_tokens": 120, "ignore_eos": True}
        text: str = server.complete(**fields).json()["choices"][0]["text"]
        return text

    found = []
    for server in servers:
        before = server.service.engine.scheduler.preemptions
        with ThreadPoolExecutor(6) as pool:
            found.append(list(pool.map(ask, [server] * 6, range(6))))
        assert server.service.engine.scheduler.preemptions > before
    assert found[0] == found[1]


@pytest.mark.parametrize(("given", "sequences", "step_tokens"), [({}, 28, 256), ({"max_num_seqs": 64}, 64, 576)])
def test_a_servers_defaults_on_a_cpu_have_room_for_drafts(
    given: dict[str, int], sequences: int, step_tokens: int
) -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 8}
    _, config = read_flags(with_defaults({"device": "cpu", "speculative_config": json.dumps(drafting), **given}))
    assert (config.max_num_seqs, config.batched_tokens) == (sequences, step_tokens)
    assert config.max_num_seqs * (1 + config.draft_tokens) <= config.batched_tokens
