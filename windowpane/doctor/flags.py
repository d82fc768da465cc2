"""Settings as vLLM prints and takes them: the engine's config line, the list of non-default arguments, a command.

All three become one dictionary from the setting's name (`tensor_parallel_size`) to its text. What is nested (the model
of a drafter, say) stays inside its value, so that it is never taken for the engine's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import pairwise

ENGINE = re.compile(r"LLM engine \(v(?P<version>[\w.+-]+)\) with config:? ?(?P<settings>.+)", re.DOTALL)
# The same, where its beginning was cut off or stands above a code fence.
CONFIG = re.compile(r"^(?P<settings>model='[^']*', (?:speculative_config|tokenizer)=.*)", re.DOTALL)
ARGUMENTS = re.compile(r"non-default args: (?P<settings>\{.*|Namespace\(.*)", re.DOTALL)
_COMMAND = re.compile(
    r"(?:^|[\s$#`(;&|])(?:vllm serve|(?:-m )?vllm\.entrypoints\.(?:openai\.)?api_server|"
    r"vllm/vllm-openai[\w-]*(?::(?P<tag>[\w.-]+))?|vllm bench \w+)(?=[\s`]|$)(?P<rest>.*)"
)
_PYTHON = re.compile(r"\bLLM\((?P<settings>\s*\w+\s*=.*)", re.DOTALL)
_FLAGS_ONLY = re.compile(r"""(?:-\s+)?["']?--[a-z].*\s["']?--[a-z]""")
_SHORT = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size", "q": "quantization"}
_OTHER_NAMES = {
    "model_tag": "model",
    "tensor_parallel": "tensor_parallel_size",
    "pipeline_parallel": "pipeline_parallel_size",
    "max_seq_len": "max_model_len",
    "kv_cache_memory": "kv_cache_memory_bytes",
    "dcp": "decode_context_parallel_size",
}
_OPENING, _CLOSING = "([{<", ")]}>"


def engine_settings(record: str) -> dict[str, str] | None:
    """Settings of `Initializing a V1 LLM engine (v0.26.0) with config: model='…', …`; None for other records."""
    match = ENGINE.search(record) or CONFIG.search(record)
    if match is None:
        return None
    return {**match.groupdict(), **_named(_pairs(match["settings"], "="))}


def argument_settings(record: str) -> dict[str, str] | None:
    """Settings of `non-default args: {'model': '…', …}`; None for other records."""
    match = ARGUMENTS.search(record)
    if match is None:
        return None
    text = match["settings"]
    separator = ":" if text.startswith("{") else "="
    inner = text[text.index("{" if separator == ":" else "(") + 1 :]
    return _named(_pairs(inner, separator))


def command_settings(line: str) -> dict[str, str] | None:
    """Settings of a `vllm serve` command, of an image's arguments, of a list of flags or of `LLM(model=…)` in Python;
    None for other lines.
    """
    if call := _PYTHON.search(line):
        return _named((name, value.strip("“”")) for name, value in _pairs(call["settings"], "=")) or None
    match = _COMMAND.search(line)
    if match is None and not _FLAGS_ONLY.match(line):
        return None
    words = _words(match["rest"].split("`")[0] if match else re.sub(r"(?:^|\s)-\s", " ", line))
    found = dict(_flags(words))
    tag = match["tag"] if match else None
    if tag and re.match(r"v?\d+\.\d+", tag):
        found["version"] = tag.removeprefix("v")
    if match and "model" not in found and (model := _positional(words)):
        found["model"] = model
    return _named(found.items()) or None


def nested(text: str) -> dict[str, str]:
    """The settings inside a value: `SpeculativeConfig(method='mtp', …)`, a dictionary or JSON."""
    opening = re.search(r"[({]", text)
    if opening is None:
        return {}
    separator = "=" if opening[0] == "(" else ":"
    return dict(_pairs(text[opening.end() :], separator))


def _named(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {_OTHER_NAMES.get(name, name): re.sub(r"(?<=\d)_(?=\d)", "", value) for name, value in pairs}


def _pairs(text: str, separator: str) -> Iterator[tuple[str, str]]:
    """name → value at the outermost level, without quotes; the text may be cut off anywhere."""
    for part in _split(text):
        name, found, value = part.partition(separator)
        name = name.strip().strip("'\"")
        if found and re.fullmatch(r"\w+", name):
            yield name, value.strip().strip("'\"")


def _split(text: str) -> Iterator[str]:
    """Parts between commas that stand in no bracket and no quotes; ends where more closes than was opened."""
    depth, quote, start = 0, "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
            if depth < 0:
                yield text[start:at]
                return
        elif char == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if not quote:  # a value that was cut off in the middle is not the value
        yield text[start:]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=False)
    except ValueError:  # an apostrophe in what follows, or a quote that was cut off
        return text.split()


def _positional(words: list[str]) -> str | None:
    """The model of a command: its first word, or a path behind flags whose values are before it."""
    if words and not words[0].startswith("-"):
        return words[0]
    for before, word in pairwise(words):
        has_value = "=" in before if before.startswith("-") else True
        if has_value and "/" in word and not word.startswith("-"):
            return word
    return None


def _flags(words: list[str]) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not re.match(r"--?[A-Za-z]", word):
            continue
        name, given, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        name = _SHORT.get(name, name) if not word.startswith("--") else name
        if not given:
            if at < len(words) and not re.match(r"--?[A-Za-z]", words[at]):
                value = words[at]
                at += 1
            elif name.startswith("no_"):
                name, value = name.removeprefix("no_"), "False"
            else:
                value = "True"
        yield name, value.strip("'\",")
