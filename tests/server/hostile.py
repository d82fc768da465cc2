"""Requests that mean harm: every endpoint and field, with values, schemas, grammars and patterns made to break things.

What is made depends on the random generator alone, so that a seed and a number find a request again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from windowpane.server.embeddings import EmbeddingsBody
from windowpane.server.messages import CountBody, MessagesBody
from windowpane.server.ollama import GenerateBody, OllamaChatBody, Options
from windowpane.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChat,
    TokenizeCompletion,
)
from windowpane.server.responses_protocol import ResponsesBody

ADMIN_KEY = "fuzz-admin"
# Every endpoint that reads a body, with what it reads: fields that are added to these are tried too.
BODIES: dict[str, tuple[Any, ...]] = {
    "/v1/completions": (CompletionBody,),
    "/v1/chat/completions": (ChatBody,),
    "/v1/responses": (ResponsesBody,),
    "/v1/messages": (MessagesBody,),
    "/v1/messages/count_tokens": (CountBody,),
    "/v1/embeddings": (EmbeddingsBody,),
    "/api/chat": (OllamaChatBody,),
    "/api/generate": (GenerateBody,),
    "/tokenize": (TokenizeCompletion, TokenizeChat),
    "/detokenize": (DetokenizeBody,),
}
# What clients of other servers send, and what nobody does.
FOREIGN_FIELDS = ("best_of", "suffix", "store", "prompt_logprobs", "documents", "guided_whitespace_pattern", "nonsense")
STORED = ("r0", "r1", "r2")  # ids under which responses are stored, asked for and deleted
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Attack:
    method: str
    path: str
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))
    leaves_early: bool = False  # the client hangs up after the first bytes of the answer

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.content[:300]!r}"


def attack(random: Random) -> Attack:
    kinds = [_completion, _completion, _chat, _chat, _constrained, _constrained, _tools, _tokenize, _detokenize]
    kinds += [_response, _response, _blocks, _blocks, _ollama, _embedding, _administer]
    return random.choice([*kinds, _place, _garbage])(random)


# -- endpoints -----------------------------------------------------------------------------------------------------


def _completion(random: Random) -> Attack:
    body: dict[str, Any] = {"prompt": _text(random), "max_tokens": random.randrange(1, 12)}
    return _post(random, "/v1/completions", body, spoiled=1.0)


def _chat(random: Random) -> Attack:
    body: dict[str, Any] = {"messages": _messages(random), "max_tokens": random.randrange(1, 12)}
    if random.random() < 0.3:
        body["thinking_token_budget"] = random.choice([*NUMBERS, 1, 2, 5])
        body["continue_final_message"] = random.random() < 0.5
    return _post(random, "/v1/chat/completions", body, spoiled=1.0)


def _constrained(random: Random) -> Attack:
    constraint = random.choice(
        [
            lambda: {"guided_json": random.choice([_schema, _schema_text])(random)},
            lambda: {"response_format": {"type": "json_schema", "json_schema": {"schema": _schema(random)}}},
            lambda: {"structured_outputs": {"json": _schema(random)}},
            lambda: {"guided_regex": _pattern(random)},
            lambda: {"guided_grammar": _grammar(random)},
            lambda: {"guided_choice": _choice(random)},
        ]
    )()
    body = {"prompt": _text(random), "max_tokens": random.randrange(1, 24), **constraint}
    return _post(random, "/v1/completions", body, spoiled=0.3)


def _tools(random: Random) -> Attack:
    functions = [{"name": f"f{i}", "parameters": _schema(random)} for i in range(random.randrange(1, 4))]
    body: dict[str, Any] = {
        "messages": _messages(random),
        "max_tokens": random.randrange(1, 24),
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": random.choice(["auto", "required", "none", {"type": "function", "function": {"name": "f0"}}]),
    }
    return _post(random, "/v1/chat/completions", body)


def _response(random: Random) -> Attack:
    items: list[Any] = []
    for message in _messages(random):
        call = {
            "type": "function_call",
            "call_id": "1",
            "name": "f",
            "arguments": random.choice(["{}", "[", _text(random)]),
        }
        result = {
            "type": "function_call_output",
            "call_id": "1",
            "output": random.choice([_text(random), _parts(random)]),
        }
        said = {"role": _mostly(random, "user", message["role"]), "content": _mostly(random, message["content"])}
        thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": _text(random)}]}
        items.append(_mostly(random, random.choice([said, said, call, result, thought])))
    body: dict[str, Any] = {
        "input": random.choice([_text(random), items]),
        "max_output_tokens": random.randrange(1, 12),
        "previous_response_id": random.choice([None, None, None, "r0", "r1", _text(random)]),
        "request_id": random.choice([None, *STORED]),
        "store": random.choice([None, True, True, False]),
        "text": random.choice([None, {"format": {"type": "json_schema", "name": "x", "schema": _schema(random)}}]),
    }
    if not body["text"]:
        tools = [{"type": "function", "name": "f0", "parameters": _schema(random)}]
        body["tools"] = random.choice([None, tools])
    return _post(random, "/v1/responses", body, spoiled=0.5)


def _blocks(random: Random) -> Attack:
    text = {"type": "text", "text": _text(random)}
    calls = {"type": "tool_use", "id": "1", "name": "f", "input": _mostly(random, {"a": _text(random)})}
    thinks = {"type": "thinking", "thinking": _text(random), "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "1", "content": random.choice([_text(random), _parts(random)])}
    turns: list[Any] = []
    for _ in range(random.randrange(3)):
        turns.append({"role": "assistant", "content": [_mostly(random, block) for block in (thinks, text, calls)]})
        turns.append({"role": _mostly(random, "user", "assistant", "system"), "content": [result, text]})
    budget = _mostly(random, random.choice([1, 2, 5]), *NUMBERS)
    body: dict[str, Any] = {
        "messages": [*turns, {"role": "user", "content": _text(random)}],
        "max_tokens": random.randrange(6, 12),
        "system": random.choice([None, _text(random), _parts(random)]),
        "stop_sequences": _mostly(random, [_text(random)[:20] or "x"]),
        "thinking": random.choice([None, None, {"type": "disabled"}, {"type": "enabled", "budget_tokens": budget}]),
        "tools": random.choice([None, [{"name": "f0", "input_schema": _schema(random)}]]),
    }
    if body["tools"]:
        choices: list[Any] = [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f0"}]
        body["tool_choice"] = _mostly(random, random.choice(choices))
    path = random.choice(["/v1/messages", "/v1/messages", "/v1/messages/count_tokens"])
    if path.endswith("count_tokens"):
        known = {name: value for name, value in body.items() if name in CountBody.model_fields}
        body = _mostly(random, known, body)
    return _post(random, path, body, spoiled=0.3)


def _parts(random: Random) -> list[Any]:
    odd = ["input_text", "output_text", "refusal", "image_url", "input_audio", "x"]
    kinds = [_mostly(random, "text", *odd) for _ in range(random.randrange(3))]
    return [{"type": kind, "text": _text(random)} for kind in kinds]


def _ollama(random: Random) -> Attack:
    known: dict[str, list[Any]] = {
        "num_predict": [-1, 1, 5],
        "temperature": [0, 0.8, 50],
        "top_k": [0, 40],
        "seed": [0, 2**53 + 1],
        "num_ctx": [1, 64, 2**31],
        "repeat_penalty": [0.5, 1.1],
        "stop": [["x"], ["", "a"] * 20],
    }
    options = {name: _mostly(random, random.choice(known[name])) for name in random.sample(list(known), 2)}
    for name in random.sample(list(Options.model_fields), random.choice([0, 0, 0, 2])):
        options[name] = _value(random)
    body: dict[str, Any] = {"model": "tiny", "options": {"num_predict": 5, **options}}
    body["stream"] = random.random() < 0.5
    body["format"] = _mostly(random, random.choice([None, "json", _schema(random)]))
    if random.random() < 0.5:
        body |= {"messages": _messages(random), "think": _mostly(random, random.choice([None, True, False]), "low", 5)}
        return _post(random, "/api/chat", body, spoiled=0.3)
    body |= {"prompt": _text(random), "raw": _mostly(random, random.choice([None, True]))}
    return _post(random, "/api/generate", body, spoiled=0.3)


def _embedding(random: Random) -> Attack:
    given = [_text(random) or "a", [_text(random) or "a"] * random.choice([1, 3, 300]), [65] * 9, [[65], [66, 67]]]
    body: dict[str, Any] = {"input": _mostly(random, random.choice(given), _tokens(random), [_tokens(random)], 5)}
    body["dimensions"] = _mostly(random, random.choice([None, 1, 8]), *NUMBERS)
    body["encoding_format"] = _mostly(random, random.choice([None, "base64", "float"]))
    return _post(random, "/v1/embeddings", body, spoiled=0.3)


def _tokenize(random: Random) -> Attack:
    body = {"prompt": _text(random)} if random.random() < 0.5 else {"messages": _messages(random)}
    return _post(random, "/tokenize", {**body, "return_token_strs": random.random() < 0.5}, spoiled=0.3)


def _detokenize(random: Random) -> Attack:
    return _post(random, "/detokenize", {"tokens": random.choice([_tokens(random), _value(random)])}, spoiled=0.2)


def _administer(random: Random) -> Attack:
    keys = {"Authorization": f"Bearer {ADMIN_KEY}"}
    wrong: list[dict[str, str]] = [{}, {"Authorization": "Bearer x"}, {"x-api-key": "x" * 9000}, {"Authorization": "?"}]
    paths = ["/reset_prefix_cache", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/wake_up", "/is_sleeping"]
    # Of no level that it knows: asleep, it would refuse everybody else.
    paths.append(f"/sleep?level={random.choice(['0', '3', '-1', 'x', '', '9' * 400, '%00'])}")
    path = random.choice(paths)
    body = {"lora_name": _mostly(random, _text(random)), "lora_path": _mostly(random, "../../etc"), "nonsense": 1}
    content = json.dumps(dict(random.sample(list(body.items()), random.randrange(4)))).encode()
    return Attack("POST", path, content, random.choice([keys, keys, *wrong]) | JSON)


def _place(random: Random) -> Attack:
    paths = ["/health", "/metrics", "/stats", "/version", "/openapi.json", "/", "/docs", "/v1/models", "/v1/models/x"]
    paths += ["/ping", "/load", "/tokenizer_info", "/api/tags", "/api/version", "/reset_prefix_cache"]
    paths += ["/sleep", "/stats/history", *(f"/requests/{name}" for name in STORED)]
    paths += [f"/v1/responses/{name}" for name in (*STORED, "x", "%00", "%F0%9F")] * 2
    paths += ["/%1b%5b2J", "/v1/models/%00", "/../../etc/passwd", "/" + "a" * 5000, *BODIES]
    headers = (
        {"Accept": "text/event-stream"} if random.random() < 0.2 else {"X-Request-Id": "x" * random.randrange(200)}
    )
    return Attack(random.choice(["GET", "GET", "HEAD", "PUT", "DELETE"]), random.choice(paths), b"", headers, True)


def _garbage(random: Random) -> Attack:
    good = json.dumps({"prompt": "a", "messages": [{"role": "user", "content": "\\ud83d\\ude00"}], "max_tokens": 2})
    made = bytearray(good.encode())
    for _ in range(random.randrange(4)):
        made[random.randrange(len(made))] = random.randrange(256)
    depth = random.choice([50, 500, 5000, 100_000])
    wrong = [bytes(made), bytes(made[: random.randrange(len(made))]), b"[" * depth, b'{"a":' * depth, b"", b"null"]
    wrong += [b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": "\\ud800"}', b"\xff\xfe", b'{"prompt": NaN}']
    return Attack("POST", random.choice([*BODIES, "/ping"]), random.choice(wrong))


def _post(random: Random, path: str, body: dict[str, Any], spoiled: float = 0.0) -> Attack:
    """`spoiled` is how often a few fields get any value."""
    if random.random() < spoiled:
        body = _spoiled(random, path, body)
    if random.random() < 0.3 and any("stream" in model.model_fields for model in BODIES[path]):
        body["stream"] = True
    ascii_only = random.random() < 0.5
    content = json.dumps(body, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    return Attack("POST", path, content, dict(JSON), leaves_early=random.random() < 0.15)


# -- fields --------------------------------------------------------------------------------------------------------

NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 3, 0.5, 1.0, 128, 129, 1e-320, 1e308, -1e308, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**40),
]


def _spoiled(random: Random, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """With a few fields of the endpoint, or of none, that have right values or wrong ones."""
    fitting: dict[str, Callable[[], Any]] = {
        "n": lambda: random.choice([1, 2, 3, 128]),
        "temperature": lambda: random.choice([0, 0.7, 1e-9, 50]),
        "top_p": lambda: random.choice([1e-9, 0.5, 1]),
        "top_k": lambda: random.choice([-1, 0, 1, 2**31]),
        "logprobs": lambda: random.choice([0, 20, True]),
        "echo": lambda: True,
        "seed": lambda: random.choice(NUMBERS),
        "logit_bias": lambda: {str(i): random.uniform(-100, 100) for i in range(random.choice([1, 250, 2000]))},
        "stop": lambda: [_text(random)[:20] or "x" for _ in range(random.choice([1, 4, 40]))],
        "stop_token_ids": lambda: _tokens(random),
        "bad_words": lambda: [_text(random)[:20] or "x" for _ in range(random.choice([1, 100, 200]))],
        "return_token_ids": lambda: True,
        "continue_final_message": lambda: True,
        "add_generation_prompt": lambda: False,
        "thinking_token_budget": lambda: random.choice([0, 1, 3, 2**31]),
        "thinking": lambda: {"type": "enabled", "budget_tokens": random.choice(NUMBERS)},
        "reasoning": lambda: {"effort": random.choice(["none", "low", "high", _text(random)])},
        "instructions": lambda: _text(random),
        "output_config": lambda: {"format": {"type": "json_schema", "schema": _schema(random)}},
        "pooling": lambda: random.choice(["mean", "last", "cls", _text(random)]),
        "return_routed_experts": lambda: True,
        "include": lambda: ["message.output_text.logprobs"],
        "top_logprobs": lambda: random.choice([0, 5, 20]),
        "request_id": lambda: random.choice(STORED),
        "chat_template_kwargs": lambda: {
            name: _value(random) for name in random.sample(["self", "tokenizer", "prompt", "messages", "tools", "x"], 2)
        },
        "cache_salt": lambda: "ü" * random.randrange(300),
    }
    fields = [name for model in BODIES[path] for name in model.model_fields]
    for name in random.sample([*fields, *FOREIGN_FIELDS], random.randrange(5)):
        is_fitting = name in fitting and random.random() < 0.6
        body[name] = fitting[name]() if is_fitting else _value(random)
    return body


def _mostly(random: Random, good: Any, *bad: Any) -> Any:
    """The first, or now and then one of the others, or anything: most requests must get past the checks of fields."""
    if random.random() < 0.9:
        return good
    return random.choice(bad) if bad else _value(random)


def _value(random: Random, depth: int = 0) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: random.choice(NUMBERS),
        lambda: random.choice([None, True, False, "", [], {}]),
        lambda: _text(random)[:200],
        lambda: _schema(random),
    ]
    if depth < 3:
        kinds.append(lambda: [_value(random, depth + 1) for _ in range(random.randrange(4))])
        kinds.append(lambda: {_text(random)[:10]: _value(random, depth + 1) for _ in range(random.randrange(4))})
    return random.choice(kinds)()


def _text(random: Random) -> str:
    texts = ["", "a", "Hello there", "<eos><bos>\n", "\x1b[2J\x00", "é\u200d\U0001f600", "{{ 1/0 }}", "\U000f0000𠀀"]
    text = random.choice(texts)
    if random.random() < 0.03:
        text += "word " * random.choice([100, 10_000, 200_000])
    return text


def _tokens(random: Random) -> list[Any]:
    strange = random.choice(NUMBERS) if random.random() < 0.3 else 1
    return [random.choice([0, 5, 65, 257, strange]) for _ in range(random.choice([1, 9, 3000]))]


def _messages(random: Random) -> list[dict[str, Any]]:
    count = random.choice([1, 1, 2, 5, 400]) if random.random() < 0.1 else random.choice([1, 2, 3])
    messages: list[dict[str, Any]] = []
    for _ in range(count):
        role = random.choice(["user", "assistant", "system", "tool"])
        message: dict[str, Any] = {"role": role, "content": _text(random)}
        if role == "assistant" and random.random() < 0.3:
            arguments = random.choice(
                ['{"a": 1}', '{"a":' * 1000, '{"a": "\\ud800"}', "[]", "", '{"a":' * 300 + "1" + "}" * 300]
            )
            message["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        if random.random() < 0.1:
            message[random.choice(["annotations", "name", "refusal", "audio", "x"])] = _value(random)
        messages.append(message)
    return messages


# -- what answers must look like -----------------------------------------------------------------------------------


def _schema(random: Random, depth: int = 0) -> dict[str, Any]:
    if depth == 0 and random.random() < 0.25:
        return random.choice([_chain, _nested, _patterns, _loops, _wide])(random)
    kind = random.choice(["string", "integer", "number", "object", "array", "anyOf", "enum", "const", "odd"])
    if kind == "string":
        limits = {
            name: random.choice([*NUMBERS[:8], 10**9]) for name in ("minLength", "maxLength") if random.random() < 0.3
        }
        return {"type": "string", **limits, **({"pattern": _pattern(random)} if random.random() < 0.3 else {})}
    if kind in ("integer", "number"):
        names = ("minimum", "maximum", "exclusiveMinimum", "multipleOf")
        return {"type": kind, **{name: random.choice(NUMBERS) for name in names if random.random() < 0.3}}
    if kind == "object" and depth < 4:
        members = {_text(random)[:8] + str(i): _schema(random, depth + 1) for i in range(random.randrange(4))}
        return {"type": "object", "properties": members, "required": list(members)[: random.randrange(4)]}
    if kind == "array" and depth < 4:
        return {"type": "array", "items": _schema(random, depth + 1), "maxItems": random.choice([0, 3, 10**6, -1])}
    if kind == "anyOf" and depth < 4:
        return {random.choice(["anyOf", "oneOf", "allOf"]): [_schema(random, depth + 1) for _ in range(2)]}
    if kind == "enum":
        return {"enum": [random.choice([*NUMBERS, "<eos>", None, _text(random)[:30]]) for _ in range(3)]}
    if kind == "const":
        return {"const": random.choice(["<eos>", "", 1e308, [1, {"a": None}], True])}
    return {
        random.choice(["type", "$ref", "not", "uniqueItems", "properties"]): random.choice(["#", 5, None, {}, True])
    }


def _schema_text(random: Random) -> str:
    return random.choice([json.dumps(_schema(random)), '{"not":' * 985 + "{}" + "}" * 985, "{", "5", "[]", ""])


def _chain(random: Random) -> dict[str, Any]:
    length = random.choice([10, 800, 3000])
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def _nested(random: Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(random.choice([20, 60, 120, 300])):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _patterns(random: Random) -> dict[str, Any]:
    count = random.randrange(2, 18)
    return {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, count)]}


def _loops(random: Random) -> dict[str, Any]:
    return random.choice([{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}, {"anyOf": [{"$ref": "#"}] * 3}])


def _wide(random: Random) -> dict[str, Any]:
    count = random.choice([100, 2000])
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


PATTERNS = (
    *(r"(a{1000}){1000}", r"((((a+)+)+)+)+b", r"(?=a)b", r"\p{L}{1,500}", r"[^\x00-\x{10ffff}]", "(" * 500, "a" * 5000),
    *(r"(a|b)*a(a|b){200}", r"(.*a){20}", r"\d{0,99999}", r"(?i)ß+", "[", r"\1", r".*.*.*.*.*=.*", "(a?){30}a{30}"),
    *("x" * 2**20, "[a-f]{2,9}", "yes|no", r"\d{4}-\d{2}"),
)


def _pattern(random: Random) -> str:
    return random.choice(PATTERNS)


GRAMMARS = (
    *(
        "start: start start | start",
        'start: "a" start | ""',
        "start: ",
        "root ::= root",
        'root ::= "a" | ' + "(" * 2000,
    ),
    *('start: "x"{1,99999999}', "start: /(a{1000}){1000}/", "start: <eos>", 'root ::= ("a"*)*', "start: undefined"),
    *('start: %json {"type": "integer"}', "start: A\nA: /" + "a?" * 500 + "/", "%%%", 'root ::= [a-z]+ "!"'),
)


def _grammar(random: Random) -> str:
    count = random.choice([5, 300, 4000])
    rules = "\n".join(f'a{i}: a{i + 1} "x"' for i in range(count))
    return random.choice([*GRAMMARS, f'start: a0\n{rules}\na{count}: "y"'])


def _choice(random: Random) -> list[str]:
    count = random.choice([1, 3, 3000])
    return [random.choice(["", "<eos>", "a"]) + str(i) * random.choice([1, 30]) for i in range(count)] + [_text(random)]
