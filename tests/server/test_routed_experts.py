"""Routed experts over HTTP, through the real client: on every choice, whole or streamed, and refused by name."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.running.small_models import CONFIGS
from tests.server.harness import FLAGS, Running, running
from tests.tiny_model import BOS, EOS, make_model

LAYERS, CHOSEN, EXPERTS = 3, 3, 8
ASKS: dict[str, Any] = {"return_routed_experts": True}
CHAT: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model(tmp_path_factory.mktemp("models") / "tiny")
    special = {"vocab_size": 258, "bos_token_id": BOS, "eos_token_id": EOS}
    (path / "config.json").write_text(json.dumps({**CONFIGS["qwen3 experts"], **special}))
    return path


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Running]:
    flags = {**FLAGS, "max_model_len": 256, "enable_return_routed_experts": True, "async_scheduling": True}
    with running(model, flags=flags) as server:
        yield server


def array(text: str) -> NDArray[Any]:
    found: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    assert found.dtype == np.uint8 and found.shape[1:] == (LAYERS, CHOSEN) and found.max() < EXPERTS
    assert all(len(set(row)) == CHOSEN for row in found.reshape(-1, CHOSEN).tolist()), "an expert is visited twice"
    return found


def complete(server: Running, prompt: Any = "Hello", **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in ("return_routed_experts", "routed_experts_prompt_start", "ignore_eos")
             if name in fields}  # fmt: skip
    asked = {"temperature": 0, "max_tokens": 7, **fields}
    return server.openai.completions.create(model="tiny", prompt=prompt, extra_body=extra, **asked)


def chat(server: Running, **fields: Any) -> Any:
    asked = {"temperature": 1.0, "max_tokens": 7, "seed": 3, **fields}
    extra = {**ASKS, "ignore_eos": True}
    return server.openai.chat.completions.create(model="tiny", messages=CHAT, extra_body=extra, **asked)


def test_each_choice_of_each_prompt_has_its_own(server: Running) -> None:
    answer = complete(server, ["Hello", "Goodbye then"], n=2, temperature=1.0, seed=1, ignore_eos=True, **ASKS)
    found = [array(choice.routed_experts) for choice in answer.choices]
    assert [len(rows) for rows in found] == [len("Hello") + 7] * 2 + [len("Goodbye then") + 7] * 2
    same = len("Hello") + 1  # BOS
    assert np.array_equal(found[0][:same], found[1][:same]) and not np.array_equal(found[0], found[1])


def test_a_stream_has_them_in_the_chunk_that_ends_a_choice(server: Running) -> None:
    whole = array(complete(server, **ASKS).choices[0].routed_experts)
    chunks = [chunk.choices[0] for chunk in complete(server, stream=True, **ASKS)]
    assert np.array_equal(array(chunks[-1].routed_experts), whole)
    assert not any(hasattr(chunk, "routed_experts") for chunk in chunks[:-1])


def test_chats_whole_and_streamed(server: Running) -> None:
    whole = [array(choice.routed_experts) for choice in chat(server, n=2).choices]
    streamed: dict[int, NDArray[Any]] = {}
    for chunk in chat(server, n=2, stream=True):
        for choice in chunk.choices:
            assert hasattr(choice, "routed_experts") == (choice.finish_reason is not None)
            if choice.finish_reason is not None:
                streamed[choice.index] = array(choice.routed_experts)
    assert all(np.array_equal(whole[index], streamed[index]) for index in (0, 1))


def test_rows_before_the_start_are_left_out(server: Running) -> None:
    every, some = (
        array(complete(server, routed_experts_prompt_start=n, **ASKS).choices[0].routed_experts) for n in (0, 4)
    )
    assert np.array_equal(some, every[4:])


def test_a_stop_string_ends_them_too(server: Running) -> None:
    text = complete(server).choices[0].text
    assert len(text) > 2
    answer = complete(server, stop=[text[1]], **ASKS)
    assert answer.choices[0].finish_reason == "stop"
    tokens = answer.usage.total_tokens
    assert len(array(answer.choices[0].routed_experts)) == tokens - 1


def test_who_does_not_ask_hears_nothing(server: Running) -> None:
    assert not hasattr(complete(server).choices[0], "routed_experts")


def test_a_start_beyond_the_prompt_is_refused_with_both_numbers(server: Running) -> None:
    refused = server.complete(prompt="Hello", routed_experts_prompt_start=7, **ASKS)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "routed_experts_prompt_start 7 is beyond the prompt's 6 tokens"


def test_a_server_without_the_flag_names_it(model: Path) -> None:
    with running(model, flags={**FLAGS, "max_model_len": 256}) as server:
        for refused in (server.complete(prompt="Hello", **ASKS), server.chat(**ASKS)):
            assert refused.status_code == 400
            assert "--enable-return-routed-experts" in refused.json()["error"]["message"]
