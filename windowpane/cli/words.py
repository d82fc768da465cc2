"""What `vllm serve` lets people type and a parser of options does not: underscores, `--model`, a file of flags, lists
of words, and flags that ask for what is so here anyway.
"""

from __future__ import annotations

import json
import re
from typing import Any

from windowpane.cli.errors import UserError
from windowpane.cli.vllm_flags import HOLDS, HOLDS_OF_KEPT, SHORT

LISTS = (
    "--api-key",
    "--served-model-name",
    "--lora-modules",
    "--lora-target-modules",
)  # take several words after one flag
JSON_LISTS = ("--allowed-origins", "--allowed-methods", "--allowed-headers")
# Switches that are on unless told; the last one cannot be turned off, and says so.
NO_FORMS = ("--enable-prefix-caching", "--async-scheduling", "--enable-layer-chain", "--enable-chunked-prefill")
# Both leave out the line per request.
NO_REQUEST_LOG = ("--disable-log-requests", "--no-enable-log-requests")


def spelled_out(words: list[str]) -> list[str]:
    """The words of a command as the parser takes them. Those of a `--config` file come first, so that others win."""
    words = [_dashed(word) for word in words]
    if words[:1] != ["serve"]:
        return words
    words = _without_what_holds(_with_model_in_front(_with_config(words)))
    return _repeated(words) if _model(words) is not None else words


def _dashed(word: str) -> str:
    """`--max_model_len=8192` as `--max-model-len=8192`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if re.fullmatch(r"--\w[\w.-]*", name) else word


def _model(words: list[str]) -> str | None:
    return words[1] if len(words) > 1 and not words[1].startswith("-") else None


def _taken_out(flag: str, words: list[str]) -> tuple[str, list[str]] | None:
    """The first value of a flag, and the words without both; None where it is not given, or nothing follows it."""
    for at, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name == flag and has_value:
            return value, words[:at] + words[at + 1 :]
        if name == flag:
            return None if at + 1 == len(words) else (words[at + 1], words[:at] + words[at + 2 :])
    return None


def _with_model_in_front(words: list[str]) -> list[str]:
    """`--model MODEL` as `MODEL`."""
    if (taken := _taken_out("--model", words)) is None:
        if words[-1] == "--model":
            raise UserError("--model is given without a model")
        return words
    model, others = taken
    named = _model(words)
    if named not in (None, model):
        raise UserError(f"the model is {named} and --model {model}; leave one out")
    return ["serve", model, *others[1 if named is None else 2 :]]


def _without_what_holds(words: list[str]) -> list[str]:
    """Without flags that ask for what is so here; their other values stay, for the parser to refuse."""
    patterns = HOLDS | HOLDS_OF_KEPT | {"--tokenizer-revision": _value_of("--revision", words)}
    if (model := _model(words)) is not None:
        patterns["--tokenizer"] = re.escape(model)
    if any(word.startswith("--reasoning-parser") for word in words):
        patterns["--enable-reasoning"] = ""
    result: list[str] = []
    rest = iter(words)
    for word in rest:
        name, has_value, value = word.partition("=")
        pattern = patterns.get(SHORT.get(name, name))
        if name in NO_REQUEST_LOG:
            result += [] if any(w.startswith("--log-level") for w in words) else ["--log-level", "warning"]
        elif pattern is None:
            result.append(word)
        elif not pattern:
            result += [word] if has_value else []
        else:
            given = [word] if has_value else [word, *([] if (after := next(rest, None)) is None else [after])]
            value = value if has_value else given[-1]
            result += [] if re.fullmatch(pattern, value) else given
    return result


def _value_of(flag: str, words: list[str]) -> str:
    """A pattern of what a flag was given, which nothing matches where it was not."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, has_value, value = word.partition("=")
        if name == flag:
            return re.escape(value if has_value else after)
    return "(?!)"


def _repeated(words: list[str]) -> list[str]:
    """`MODEL --api-key A B` as `MODEL --api-key A --api-key B`. Without a model in front, B would be the model."""
    result: list[str] = []
    flag = None
    for word in words:
        if word.startswith("-"):
            flag = word if word in LISTS else None
            result.append(word)
        elif flag is not None and result[-1] != flag:
            result += [flag, word]
        else:
            result.append(word)
    return result


def _with_config(words: list[str]) -> list[str]:
    if (taken := _taken_out("--config", words)) is None:
        return words  # where nothing follows it, the parser says what is missing
    file, others = taken
    given = {word.partition("=")[0] for word in others}
    model, flags = _read(file, given)
    named = _model(others) is not None
    model = [] if "--model" in given else model
    return ["serve", *(others[1:2] if named else model), *flags, *others[2 if named else 1 :]]


def _read(file: str, given: set[str]) -> tuple[list[str], list[str]]:
    """The model that a file names, if it does, and its flags. Lists that are also typed are those that are typed."""
    fields = read_yaml(file, "--config", "names of flags to values, as in `max-model-len: 8192`")
    model = fields.pop("model", None)
    flags = [word for name, value in fields.items() if f"--{name}" not in given for word in flag_words(name, value)]
    return ([] if model is None else [str(model)]), flags


def read_yaml(file: str, what: str, maps: str) -> dict[str, Any]:
    """A file's one mapping, with dashes in its names. `what` reads it, and it `maps` what errors say."""
    try:
        import yaml

        with open(file, encoding="utf-8") as text:
            document = yaml.safe_load(text)
    except ModuleNotFoundError:
        raise UserError(f"{what} needs PyYAML: pip install pyyaml") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{what} {file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise UserError(f"{what} {file} maps {maps}")
    return dashed(document)


def dashed(fields: dict[Any, Any]) -> dict[str, Any]:
    return {str(name).replace("_", "-"): value for name, value in fields.items()}


def flag_words(name: str, value: Any) -> list[str]:
    """A flag of a file as it would be typed."""
    flag = f"--{name}"
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{name}"] if flag in NO_FORMS else []
    if isinstance(value, dict) or (isinstance(value, list) and flag in JSON_LISTS):
        return [flag, json.dumps(value)]
    if isinstance(value, list):
        return [word for one in value for word in (flag, str(one))]
    return [flag, str(value)]
