"""Embeddings: /v1/embeddings through the real client, and what they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.server.harness import FLAGS, Running
from tests.server.test_refusals import error_of
from windowpane import LLM


def vectors(server: Running, given: Any, **fields: Any) -> np.ndarray[Any, Any]:
    answer = server.openai.embeddings.create(model="tiny", input=given, **fields)
    return np.array([entry.embedding for entry in answer.data], dtype=np.float32)


def test_each_prompt_has_one_whatever_its_form(server: Running) -> None:
    texts = ["Hello", "There is a window, and it slides"]
    both = vectors(server, texts)
    np.testing.assert_allclose(np.linalg.norm(both, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(vectors(server, texts[0])[0], both[0], atol=1e-5)
    tokens = server.service.need_tokenizer("").encode(texts[1])
    np.testing.assert_allclose(vectors(server, [tokens])[0], both[1], atol=1e-5)
    assert both.shape == (2, 64)
    usage = server.openai.embeddings.create(model="tiny", input=texts).usage
    assert usage.prompt_tokens == sum(map(len, texts)) + 2  # a token to a character, and BOS


def test_base64_and_floats_are_the_same(server: Running) -> None:
    in_base64 = vectors(server, "Hello")  # the client asks for base64 and decodes it
    np.testing.assert_array_equal(in_base64, vectors(server, "Hello", encoding_format="float"))
    raw = server.http.post("/v1/embeddings", json={"input": "Hello", "encoding_format": "base64"}).json()
    assert isinstance(raw["data"][0]["embedding"], str)


def test_fewer_dimensions_are_the_first_scaled_again(server: Running) -> None:
    whole, part = vectors(server, "Hello")[0], vectors(server, "Hello", dimensions=4)[0]
    np.testing.assert_allclose(part, whole[:4] / np.linalg.norm(whole[:4]), rtol=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions 4096 exceeds"):
        vectors(server, "Hello", dimensions=4096)


def test_what_cannot_be_embedded_is_refused(server: Running) -> None:
    for fields, message in (
        ({"input": []}, "empty"),
        ({"input": "x" * 600}, "maximum context length"),
        ({"input": [10**6]}, "not in the vocabulary"),
        ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": {"image": "x"}}, "input"),
    ):
        assert message in error_of(server.http.post("/v1/embeddings", json=fields), 400)["message"]


def test_the_mean_is_that_of_all_hidden_states(model: Path) -> None:
    """A causal model's last hidden state of each prefix is that of its last token: their mean is known."""
    with LLM(model, **FLAGS) as llm:  # prompts are cut into chunks of 64 tokens
        tokens = llm.tokenizer.encode("A window slides over tokens, " * 4)
        assert len(tokens) > FLAGS["max_num_batched_tokens"]
        lasts = llm.embed([tokens[:end] for end in range(1, len(tokens) + 1)], normalize=False)
        (mean,) = llm.embed([tokens], pooling="mean", normalize=False)
        np.testing.assert_allclose(mean, np.mean(lasts, axis=0), atol=1e-4)
        (again,) = llm.embed([tokens], pooling="mean", normalize=False)
        np.testing.assert_allclose(again, mean, atol=1e-5, err_msg="a prefix that was found computed has no states")
        with pytest.raises(ValueError, match="pooling is mean or last"):
            llm.embed("x", pooling="max")  # type: ignore[arg-type]
        llm.engine.manager.check_idle()
