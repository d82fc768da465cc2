"""What the server refuses, and that it says why in the shape that clients read. Nothing is left behind."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.models.small_configs import small
from tests.server.harness import Running, running
from windowpane.server.protocol import NEUTRAL, UNSUPPORTED, ChatBody, CompletionBody
from windowpane.server.service import Limits


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


class TestFields:
    @pytest.mark.parametrize("name", sorted(UNSUPPORTED))
    def test_fields_of_other_servers_are_refused_by_name(self, server: Running, name: str) -> None:
        completes, chats = (name not in body.model_fields for body in (CompletionBody, ChatBody))
        answers = [server.complete(prompt="a", **{name: "x"})] * completes + [server.chat(**{name: "x"})] * chats
        for answer in answers:
            error = error_of(answer, 400)
            assert error["param"] == name and error["code"] == "unsupported_parameter"
            assert name in error["message"] and UNSUPPORTED[name] in error["message"]

    @pytest.mark.parametrize("name", sorted(NEUTRAL))
    def test_but_not_where_they_ask_for_nothing(self, server: Running, name: str) -> None:
        for value in (None, *NEUTRAL[name]):
            assert server.complete(prompt="a", max_tokens=1, **{name: value}).status_code == 200

    def test_a_refused_field_is_refused_somewhere(self) -> None:
        assert not set(CompletionBody.model_fields) & set(ChatBody.model_fields) & set(UNSUPPORTED)
        assert set(NEUTRAL) <= set(UNSUPPORTED)

    def test_unknown_fields_are_errors_too(self, server: Running) -> None:
        error = error_of(server.complete(prompt="a", temprature=1), 400)
        assert error["param"] == "temprature" and "temprature" in error["message"]
        for name in ("prom[t", "Prompt", "str", "int", ""):
            assert error_of(server.complete(prompt="a", **{name: 1}), 400)["param"] == (name or None)
        nested = server.chat(stream=True, stream_options={"include_usages": True})
        assert error_of(nested, 400)["param"] == "stream_options.include_usages"

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"prompt": 5}, "prompt"),
            ({"prompt": {"a": 1}}, "prompt"),
            ({"prompt": ["a", 5]}, "prompt.1"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[]]}, "prompt"),
            ({"prompt": [-1]}, "prompt.0"),
            ({"prompt": [10**30]}, "prompt"),
            ({"prompt": [258]}, "prompt"),
            ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
            ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
            ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
            ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
            ({"prompt": "a", "temperature": -1}, "temperature"),
            ({"prompt": "a", "temperature": True}, "temperature"),
            ({"prompt": "a", "top_p": 0}, "top_p"),
            ({"prompt": "a", "top_k": -2}, "top_k"),
            ({"prompt": "a", "n": 0}, "n"),
            ({"prompt": "a", "n": 10**6}, "n"),
            ({"prompt": "a", "logprobs": 21}, "logprobs"),
            ({"prompt": "a", "stop": ""}, "stop"),
            ({"prompt": "a", "stop": [5]}, "stop.0"),
            ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
            ({"prompt": "a", "logit_bias": {"5": 1000}}, "logit_bias.5"),
            ({"prompt": "a", "stream_options": {}}, "stream_options"),
            ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
            ({"prompt": "a", "request_id": "a b"}, "request_id"),
        ],
    )
    def test_wrong_values_are_named(self, server: Running, fields: dict[str, Any], param: str) -> None:
        error = error_of(server.complete(**fields), 400)
        assert error["param"] == param, error
        assert error["message"].isprintable()

    @pytest.mark.parametrize(
        "fields", [{"stop_token_ids": [258]}, {"logit_bias": {"258": 1}}, {"stop_token_ids": [10**30]}]
    )
    def test_tokens_that_do_not_exist_are_refused(self, server: Running, fields: dict[str, Any]) -> None:
        assert "vocabulary" in error_of(server.complete(prompt="a", **fields), 400)["message"]

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"messages": []}, "messages"),
            ({"messages": "Hi"}, "messages"),
            ({"messages": [{"role": "king", "content": "Hi"}]}, "messages.0.role"),
            ({"messages": [{"role": "user"}]}, "messages.0.content"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
            ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"reasoning_effort": "high"}, "reasoning_effort"),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ],
    )
    def test_wrong_chats_are_named(self, server: Running, fields: dict[str, Any], param: str | None) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        answer = server.http.post(
            "/v1/chat/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        assert error_of(answer, 400)["param"] == param


class TestBodies:
    @pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b"[1]", b"\xff\xfe", b"5", b"null", b"[" * 10_000])
    def test_what_is_no_json_object_is_refused(self, server: Running, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            error_of(server.http.post(path, content=body, headers=headers), 400)

    def test_deep_nesting_is_no_crash(self, server: Running) -> None:
        body = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
        error_of(server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}), 400)

    def test_another_content_type_is_refused(self, server: Running) -> None:
        answer = server.http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
        assert "Content-Type: application/json" in error_of(answer, 400)["message"]

    @pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
    def test_numbers_that_are_none_are_refused(self, server: Running, value: str) -> None:
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"):
            body = f'{{"prompt": "a", "{name}": {value}}}'
            answer = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            error_of(answer, 400)

    def test_a_truncated_body_leaves_nothing_behind(self, server: Running) -> None:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        for sent in (b"", b'{"prompt": "a"', b'{"prompt": "a"}' + b" " * 84):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(head + sent)
        assert server.complete(prompt="a", max_tokens=1).status_code == 200


class TestPlaces:
    def test_an_unknown_model_is_not_found(self, server: Running) -> None:
        with pytest.raises(openai.NotFoundError, match="is not served here; there is tiny") as refusal:
            server.openai.completions.create(model="gpt-5", prompt="a")
        assert (refusal.value.code, refusal.value.param) == ("model_not_found", "model")
        error_of(server.http.get("/v1/models/gpt-5"), 404)

    def test_unknown_places_and_methods_look_alike(self, server: Running) -> None:
        message = error_of(server.http.post("/v1/rerank"), 404)["message"]
        assert "/v1/chat/completions, " in message and "/v1/embeddings, " in message and "/docs" in message
        error_of(server.http.get("/v1/completions"), 405)

    def test_models_are_listed_by_name(self, server: Running) -> None:
        (model,) = server.openai.models.list().data
        assert (model.id, model.object) == ("tiny", "model")
        assert server.openai.models.retrieve("tiny").id == "tiny"
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 512

    def test_docs_and_version(self, server: Running) -> None:
        assert server.http.get("/docs").status_code == 200
        assert set(server.http.get("/openapi.json").json()["paths"]) >= {"/v1/completions", "/metrics", "/health"}
        assert server.http.get("/version").json() == {"version": "0.1.0"}


class TestLengths:
    def test_a_prompt_that_is_too_long_is_told_the_numbers(self, server: Running) -> None:
        with pytest.raises(openai.BadRequestError) as refusal:
            server.openai.completions.create(model="tiny", prompt="x" * 600)
        assert refusal.value.code == "context_length_exceeded"
        assert "512" in refusal.value.message and "601" in refusal.value.message
        with pytest.raises(openai.BadRequestError, match="512"):
            server.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 600}])

    def test_so_is_an_answer(self, server: Running) -> None:
        error = error_of(server.complete(prompt="x" * 500, max_tokens=100), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
        assert all(number in error["message"] for number in ("501", "100", "601", "512"))

    def test_the_longest_that_fits_runs(self, server: Running) -> None:
        assert server.complete(prompt="x" * 510, max_tokens=2, ignore_eos=True).json()["usage"]["total_tokens"] == 513


class TestChecking:
    """Once, before a request is queued: what the engine would refuse is an HTTP error, never an event of a stream."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_grammar_that_could_not_end_the_answer_is_refused(self, server: Running, stream: bool) -> None:
        answer = server.complete(prompt="a", guided_regex="a+", ignore_eos=True, stream=stream)
        assert "leave ignore_eos out" in error_of(answer, 400)["message"]

    def test_each_choice_is_checked_once(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        checked: list[str] = []
        check = server.service.engine.scheduler.check
        monkeypatch.setattr(server.service.engine.scheduler, "check", lambda r: (checked.append(r.id), check(r)))
        assert server.complete(prompt="a", max_tokens=1, n=2, request_id="twins").status_code == 200
        assert checked == ["twins-0", "twins-1"]


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[Running]:
    limits = Limits(max_queue=2, max_body_bytes=1000)
    with running(model, api_keys=("sesame", "ünlock"), served_model_names=("a", "b"), limits=limits) as server:
        yield server


class TestGuards:
    def test_without_a_key_only_health_and_the_empty_page_are_shown(self, guarded: Running) -> None:
        assert guarded.http.get("/health").status_code == guarded.http.get("/").status_code == 200
        for path in ("/v1/models", "/metrics", "/stats", "/version", "/docs", "/openapi.json", "/nonsense"):
            assert error_of(guarded.http.get(path), 401)["code"] == "invalid_api_key"
        assert guarded.http.get("/v1/models").headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize("key", ["x", "sesam", "sesamee", "SESAME", "none"])
    def test_a_wrong_key_is_none(self, guarded: Running, key: str) -> None:
        for header in (f"Bearer {key}", f"Basic {key}", key):
            error_of(guarded.http.get("/v1/models", headers={"Authorization": header}), 401)

    def test_the_client_is_told(self, guarded: Running) -> None:
        with pytest.raises(openai.AuthenticationError, match="an API key is needed"):
            guarded.openai.models.list()

    def test_each_of_several_keys_opens(self, guarded: Running) -> None:
        for key in ("sesame", "ünlock"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert guarded.http.get("/v1/models", headers=headers).status_code == 200

    def test_a_browser_is_asked_for_a_password(self, guarded: Running) -> None:
        asked = guarded.http.get("/docs", headers={"Accept": "text/html,*/*"})
        assert asked.status_code == 401 and asked.headers["www-authenticate"].startswith("Basic")
        assert guarded.http.get("/docs", auth=("anybody", "sesame")).status_code == 200

    def test_a_body_beyond_the_limit_is_refused_whatever_it_says_of_itself(self, guarded: Running) -> None:
        headers = {"Authorization": "Bearer sesame", "Content-Type": "application/json"}
        body = json.dumps({"prompt": "x" * 2000}).encode()
        error_of(guarded.http.post("/v1/completions", content=body, headers=headers), 413)
        chunks = (body[i : i + 100] for i in range(0, len(body), 100))  # sent without a length
        error_of(guarded.http.post("/v1/completions", content=chunks, headers=headers), 413)

    def test_every_name_is_served(self, guarded: Running) -> None:
        headers = {"Authorization": "Bearer sesame"}
        listed = guarded.http.get("/v1/models", headers=headers).json()["data"]
        assert [model["id"] for model in listed] == ["a", "b"]
        for name in ("a", "b"):
            body = {"model": name, "prompt": "x", "max_tokens": 1}
            assert guarded.http.post("/v1/completions", json=body, headers=headers).json()["model"] == "a"

    def test_a_full_queue_turns_away(self, guarded: Running) -> None:
        headers = {"Authorization": "Bearer sesame"}
        most = guarded.service.engine.manager.num_slots + guarded.service.limits.max_queue
        with guarded.engine_held():
            asking = [
                guarded.post_in_thread("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers)
                for _ in range(most)
            ]
            guarded.wait_until(lambda: guarded.service.loop.waiting == most, "all are queued")
            refused = guarded.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        for thread in asking:
            thread.join()
        guarded.wait_until_idle()
        error = error_of(refused, 429)
        assert error["code"] == "queue_full" and int(refused.headers["retry-after"]) >= 1

    def test_requests_that_are_being_read_have_their_places(self, guarded: Running) -> None:
        headers = {"Authorization": "Bearer sesame"}
        body = {"prompt": "x", "max_tokens": 1}
        most = guarded.service.engine.manager.num_slots + guarded.service.limits.max_queue
        with suppress(InterruptedError), ExitStack() as others:
            for _ in range(most):
                others.enter_context(guarded.service.admitted(1))
            refused = guarded.http.post("/v1/completions", json=body, headers=headers)
            raise InterruptedError  # they are given up, and their places with them
        assert error_of(refused, 429)["code"] == "queue_full"
        assert guarded.http.post("/v1/completions", json=body, headers=headers).status_code == 200


class TestWithoutText:
    def test_a_model_without_a_tokenizer_takes_token_ids(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(small("llama")))
        with running(tmp_path) as server:
            assert server.complete(prompt=[1, 2], max_tokens=3).json()["usage"]["completion_tokens"] == 3
            for fields in ({"prompt": "a"}, {"prompt": [1], "stop": "x"}, {"prompt": [1], "logprobs": 1}):
                assert "without a tokenizer" in error_of(server.complete(**fields), 400)["message"]
            assert "tokenizer" in error_of(server.complete(prompt=[1], guided_regex="a"), 400)["message"]
            error_of(server.chat(), 400)
            error_of(server.http.post("/tokenize", json={"prompt": "a"}), 400)
