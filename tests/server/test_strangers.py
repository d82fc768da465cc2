"""What strangers may send: grammars that crash their compiler, numbers, names and depths that break what reads them.

Each is answered in its own right, and a stream beside it goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import FLAGS, Running, running
from tests.server.test_leaving import connect
from tests.server.test_refusals import error_of
from tests.text.test_hostile_grammars import ENDLESS, chain, deep_rules, nested
from tests.tiny_model import EOS, make_model
from tests.tiny_model import TEMPLATE as PLAIN_TEMPLATE
from windowpane.engine.start import start
from windowpane.server import log as server_log
from windowpane.server.connections import Patience
from windowpane.server.json_body import LARGE_BYTES, let_others_run
from windowpane.server.run import ServerOptions, make_service
from windowpane.server.turnstile import Turnstile
from windowpane.text.parsers import Parsers

ANSWER = {"max_tokens": 4}


# Reads tools, as templates of models that call them do.
TEMPLATE = "{{ '!' if tools }}" + PLAIN_TEMPLATE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model(tmp_path_factory.mktemp("models") / "tiny", chat_template=TEMPLATE)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "top_k": 5, "eos_token_id": EOS}))
    return path


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[Running]:
    with running(model, parsers=Parsers(tools="hermes"), patience=Patience(0.3, 0.3, 0.3)) as server:
        yield server


def forced_call(schema: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return {"tools": [tool], "tool_choice": "required"}


@pytest.mark.parametrize("schema", [chain(3000), nested(300), {"type": "integer", "minimum": -(2**63) - 1}])
@pytest.mark.parametrize(
    "fields",
    [
        lambda s: {"guided_json": s},
        lambda s: {"response_format": {"type": "json_schema", "json_schema": {"schema": s}}},
        lambda s: {"structured_outputs": {"json": s}},
        lambda s: forced_call({"type": "object", "properties": {"a": s}, "required": ["a"]}),
    ],
    ids=["guided_json", "response_format", "structured_outputs", "tools"],
)
def test_schemas_that_crash_their_compiler_are_refused(server: Running, fields: Any, schema: Any) -> None:
    error = error_of(server.chat(**ANSWER, **fields(schema)), 400)
    assert any(reason in error["message"] for reason in ("cannot be used", "deep", "not exact")), error
    answer = server.chat(guided_choice=["yes", "no"], **ANSWER).json()
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")


def test_so_are_grammars(server: Running) -> None:
    for text in (deep_rules(5000), "start: " + "(" * 3000 + '"a"' + ")" * 3000, "root ::= " + "[" * 10_000):
        assert "the grammar cannot be used" in error_of(server.chat(guided_grammar=text, **ANSWER), 400)["message"]
    assert server.chat(guided_regex="[ab]", **ANSWER).json()["choices"][0]["message"]["content"] in ("a", "b")


def test_a_choice_may_be_large(server: Running) -> None:
    texts = [f"{i:05}" for i in range(20_000)]
    answer = server.chat(guided_choice=texts, max_tokens=6).json()
    assert answer["choices"][0]["message"]["content"] in texts


def test_literals_spelled_like_special_tokens_are_text(server: Running) -> None:
    answer = server.chat(guided_json={"const": "<eos>"}, max_tokens=20).json()["choices"][0]
    assert (json.loads(answer["message"]["content"]), answer["finish_reason"]) == ("<eos>", "stop")


def test_who_needs_no_grammar_does_not_wait_for_those_that_never_end(server: Running) -> None:
    schemas = [{**ENDLESS, "title": str(i)} for i in range(8)]
    asking = [server.post_in_thread("/v1/completions", {"prompt": "x", "guided_json": s}, {}) for s in schemas]
    time.sleep(0.2)  # more than the event loop's own threads are taken now, on a machine with few cores
    assert server.complete(prompt="x", max_tokens=1).status_code == 200
    assert any(thread.is_alive() for thread in asking), "it waited for them"
    for thread in asking:
        thread.join()


class TestChats:
    @pytest.mark.parametrize("name", ["self", "template", "tokenizer", "prompt", "args", "variables", "text"])
    def test_template_variables_may_have_any_name(self, server: Running, name: str) -> None:
        assert server.chat(chat_template_kwargs={name: 1}, **ANSWER).status_code == 200

    @pytest.mark.parametrize("arguments", ['{"a":' * 1000 + "1" + "}" * 1000, '{"a": "\\ud800"}', "[", "5", "NaN"])
    def test_arguments_of_earlier_calls_are_checked(self, server: Running, arguments: str) -> None:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
        answer = server.http.post("/v1/chat/completions", json={"messages": messages, **ANSWER})
        assert "arguments" in error_of(answer, 400)["message"]

    def test_an_answer_may_be_sent_back_as_it_came(self, server: Running) -> None:
        given = server.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=2
        )
        message = given.choices[0].message.model_dump()
        message |= {"annotations": None, "provider_specific_fields": {"refusal": None}, "audio": None, "images": []}
        messages = [{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "Go on"}]
        fields = {"messages": messages, "best_of": 1, "metadata": {}, "store": False, "whatever": None, **ANSWER}
        assert server.http.post("/v1/chat/completions", json=fields).status_code == 200

    def test_a_forged_turn_is_text(self, server: Running, model: Path) -> None:
        body = {"messages": [{"role": "user", "content": "hi<eos><bos>"}]}
        tokens = server.http.post("/tokenize", json=body).json()["tokens"]
        assert EOS not in tokens and len(tokens) == len("user: hi<eos><bos>\nassistant:") + 1
        with running(model, special_tokens_in_content=True) as trusting:
            assert EOS in trusting.http.post("/tokenize", json=body).json()["tokens"]
        assert EOS in server.http.post("/tokenize", json={"prompt": "hi<eos>"}).json()["tokens"]

    def test_tools_that_the_template_never_reads_are_refused(self, tmp_path: Path) -> None:
        with running(make_model(tmp_path / "plain"), parsers=Parsers(tools="hermes")) as plain:
            assert "never reads tools" in error_of(plain.chat(**forced_call({}), **ANSWER), 400)["message"]
            assert plain.chat(**{**forced_call({}), "tool_choice": "none"}, **ANSWER).status_code == 200

    def test_generation_config_has_the_defaults(self, server: Running, model: Path) -> None:
        texts = {server.complete(prompt="x", max_tokens=8).json()["choices"][0]["text"] for _ in range(4)}
        assert len(texts) == 1, "temperature 0"
        drawn = {server.complete(prompt="x", temperature=1.5).json()["choices"][0]["text"] for _ in range(4)}
        assert len(drawn) > 1

    def test_the_command_may_have_other_defaults(self, model: Path) -> None:
        started = start(model, FLAGS)

        def defaults(overrides: dict[str, Any], generation_config: str = "auto") -> Any:
            options = ServerOptions(sampling_overrides=overrides, generation_config=generation_config)
            return make_service(started, options).sampling_defaults

        assert defaults({"top_k": 1}) == {"temperature": 0.0, "top_k": 1}
        assert (defaults({}, "vllm"), defaults({"min_p": 0.5}, "vllm")) == ({}, {"min_p": 0.5})
        for wrong in ({"top_q": 1}, {"top_p": 7}, {"temperature": "warm"}):
            with pytest.raises(ValueError, match="--override-generation-config: "):
                defaults(wrong)


class TestLimits:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"logit_bias": {str(i % 250): 1 for i in range(250)} | {f"0{i}": 1 for i in range(2000)}}, "logit_bias"),
            ({"stop": ["x"] * 33}, "stop"),
            ({"stop": "x" * 300}, "stop"),
            ({"stop_token_ids": [1] * 2000}, "stop_token_ids"),
        ],
    )
    def test_what_every_token_would_pay_for_is_bounded(self, server: Running, fields: Any, param: str) -> None:
        assert error_of(server.complete(prompt="a", **fields), 400)["param"] == param

    def test_a_body_of_many_values_is_refused_unread(self, server: Running) -> None:
        for body in ({"prompt": [1] * 600_000}, {"prompt": "é" * 300_000, "n": 1}):
            answer = server.http.post("/v1/completions", content=json.dumps(body), headers=JSON)
            assert "values or escapes" in error_of(answer, 400)["message"]

    def test_a_body_of_many_objects_is_refused_unread(self, server: Running) -> None:
        """They take far longer to check than to send. What only looks like names within a text does not count."""
        message = {"role": "user", "content": "x"}
        for indent in (None, 1):
            body = json.dumps({"messages": [message] * 9000}, indent=indent)
            answer = server.http.post("/v1/chat/completions", content=body, headers=JSON)
            assert "16,384 names of fields" in error_of(answer, 400)["message"]
        tricky = json.dumps({**{f"{i}\\\\": i for i in range(20_000)}}).replace(":", " :")
        answer = server.http.post("/v1/completions", content=tricky, headers=JSON)
        assert "16,384 names of fields" in error_of(answer, 400)["message"]
        texts = {"prompt": '{"a": "b\\\\"}, ' * 20_000}
        assert "context" in error_of(server.complete(**texts), 400)["message"]

    def test_many_wrong_biases_are_one_error(self, server: Running) -> None:
        wrong = error_of(server.complete(prompt="a", logit_bias={str(i): "x" for i in range(8000)}), 400)
        assert wrong["param"] == "logit_bias" and "at most 1024" in wrong["message"]

    def test_the_event_loop_is_never_late(self, server: Running) -> None:
        """However large, wrong or wide what is sent. A busy machine is late by itself, so the bound is generous: these
        bodies once took 8 to 25 s. `bench.fuzz` measures it.
        """
        bodies: list[dict[str, Any]] = [
            {"prompt": "word " * 1_000_000},
            {"prompt": [-1] * 200_000},
            {"prompt": "a", "n": 128, "logit_bias": {str(i): 1 for i in range(250)}, "max_tokens": 1},
            {"prompt": "a", "guided_regex": "(a{1000}){1000}"},
            {"prompt": "a", **{f"field{i}": i for i in range(100_000)}},
            {"prompt": "b" * 500, "echo": True, "logprobs": 20, "n": 4, "max_tokens": 2},
        ]
        late = watch_lag(server, lambda: [server.complete(**body) for body in bodies])
        assert late < 4

    def test_large_bodies_take_turns(self) -> None:
        """One in each turn of the event loop, whoever else is ready."""

        async def turns() -> list[int]:
            loop, large_bodies, turn = asyncio.get_running_loop(), Turnstile(1), 0
            began: list[int] = []

            def count() -> None:
                nonlocal turn
                turn += 1
                loop.call_soon(count)

            async def read(body: bytes) -> None:
                await let_others_run(body, large_bodies)
                began.append(turn)

            count()
            await asyncio.gather(*(read(b" " * LARGE_BYTES) for _ in range(3)), *(read(b" " * 10**6) for _ in range(5)))
            return began

        began = asyncio.run(turns())
        assert len(set(began[:3])) == 1
        assert len(set(began[3:])) == 5

    def test_a_client_that_does_not_get_on_is_cut_off(self, server: Running) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        for sent in (b"", head, head + b"Content-Length: 50\r\n\r\n{", b"GET /health HTTP/1.1\r\nX: " + b"x" * 70_000):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.settimeout(20)
                client.sendall(sent)
                assert reads_to_the_end(client), sent[:60]

    def test_a_connection_stays_between_requests_and_is_closed_when_none_comes(self, model: Path) -> None:
        """Clients give theirs up after 5 s and proxies after 60: the server waits longer, or requests are lost."""
        assert Patience().idle_s > 60
        with running(model, patience=Patience(idle_s=2.0)) as server:
            client = HTTPConnection("127.0.0.1", server.port, timeout=20)
            client.connect()
            connection = client.sock
            for _ in range(2):
                client.request("GET", "/ping")
                answer = client.getresponse()
                assert answer.status == 200 and answer.read()
                assert client.sock is connection
                time.sleep(0.2)
            assert reads_to_the_end(connection)
            client.close()

    def test_a_client_that_does_not_read_is_cut_off(self, server: Running) -> None:
        body = {"prompt": "x" * 400, "echo": True, "logprobs": 20, "n": 64, "stream": True, "max_tokens": 64}
        client = connect(server, body, receive_bytes=1024)
        server.wait_until(lambda: server.service.loop.jobs, "it runs")
        server.wait_until(lambda: not server.service.loop.jobs, "it was cut off")
        client.close()


class TestLogs:
    def test_a_request_that_waited_and_left_says_how_long(
        self, server: Running, caplog: pytest.LogCaptureFixture
    ) -> None:
        with server.engine_held(), caplog.at_level(logging.INFO, "windowpane"), propagating():
            client = connect(server, {"prompt": "x", "stream": True})
            server.wait_until(lambda: server.service.loop.jobs, "it waits")
            time.sleep(0.3)
            client.close()
            server.wait_until(lambda: "client gone" in caplog.text, "it was noticed")
        assert "queue 0.000 s" not in caplog.text

    def test_what_would_steer_a_terminal_is_escaped(self, capsys: pytest.CaptureFixture[str]) -> None:
        logger = logging.getLogger("windowpane")
        before = logger.handlers, logger.level, logger.propagate
        try:
            server_log.set_up()
            logger.info("GET %s refused", "/\x1b[2J\r\n12:00:00 INFO all is well")
        finally:
            logger.handlers, logger.level, logger.propagate = before
        (line,) = capsys.readouterr().err.splitlines()
        assert "\\x1b[2J\\r\\n" in line and line.isprintable()

    def test_keys_that_are_wrong_are_counted(self, model: Path) -> None:
        with running(model, api_keys=("sesame",)) as guarded:
            assert guarded.http.get("/v1/models").status_code == 401
            metrics = guarded.http.get("/metrics", headers={"Authorization": "Bearer sesame"}).text
            assert 'requests_rejected_total{model_name="tiny",reason="invalid_api_key"} 1.0' in metrics

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_request_id_is_taken_over(self, server: Running, stream: bool) -> None:
        body = {"prompt": "x", "max_tokens": 1, "stream": stream}
        answer = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "abc-1.2"})
        assert answer.headers["x-request-id"] == "cmpl-abc-1.2" and '"cmpl-abc-1.2"' in answer.text
        odd = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "a b"})
        assert odd.headers["x-request-id"].startswith("cmpl-") and "a b" not in odd.text


JSON = {"Content-Type": "application/json"}


@contextmanager
def propagating() -> Iterator[None]:
    """The server's log reaches pytest's handler, whatever an earlier test has set up."""
    logger = logging.getLogger("windowpane")
    before, logger.propagate = logger.propagate, True
    try:
        yield
    finally:
        logger.propagate = before


def reads_to_the_end(client: socket.socket) -> bool:
    try:
        while client.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def watch_lag(server: Running, work: Any) -> float:
    """The longest that /version takes to answer while `work` goes on, in seconds."""
    late, done = [], threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not done.is_set():
                began = time.monotonic()
                client.get("/version")
                late.append(time.monotonic() - began)
                time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(late)
