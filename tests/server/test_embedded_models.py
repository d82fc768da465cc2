"""The embedded models behind the real client: a base model that completes, and one that chats."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.harness import Running, running

FLAGS = {"device": "cpu", "max_model_len": 1024, "max_num_seqs": 4, "kv_cache_memory_bytes": 128 * 2**20}


@pytest.fixture(scope="module")
def gemma() -> Iterator[Running]:
    with running("gemma-3-270m", flags=FLAGS) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def smollm() -> Iterator[Running]:
    with running("smollm2-135m-instruct", flags=FLAGS) as server:
        yield server
        server.wait_until_idle()


class TestGemma:
    def test_it_knows_a_capital(self, gemma: Running) -> None:
        fields = {"model": "gemma-3-270m", "prompt": "Paris is the capital of", "max_tokens": 4, "temperature": 0}
        answer = gemma.openai.completions.create(**fields)  # type: ignore[call-overload]
        assert answer.choices[0].text.startswith(" France")
        chunks = list(gemma.openai.completions.create(**fields, stream=True))  # type: ignore[call-overload]
        assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text

    def test_it_cannot_chat_and_says_so(self, gemma: Running) -> None:
        answer = gemma.chat()
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "no_chat_template"

    def test_it_keeps_to_a_format(self, gemma: Running) -> None:
        answer = gemma.complete(
            prompt="Is Paris the capital of France? Answer:",
            temperature=0,
            structured_outputs={"choice": ["yes", "no"]},
        )
        assert answer.json()["choices"][0]["text"] in ("yes", "no")


class TestSmolLM:
    def test_it_chats(self, smollm: Running) -> None:
        messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
        fields = {"model": "smollm2-135m-instruct", "messages": messages, "max_tokens": 24, "temperature": 0}
        answer = smollm.openai.chat.completions.create(**fields)  # type: ignore[call-overload]
        assert "Paris" in answer.choices[0].message.content
        chunks = list(smollm.openai.chat.completions.create(**fields, stream=True))  # type: ignore[call-overload]
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == answer.choices[0].message.content
