"""What `vllm serve` lets people type and a parser of options does not: a file of flags, and lists of words."""

from __future__ import annotations

import json
from typing import Any

from windowpane.cli.errors import UserError

LISTS = (
    "--api-key",
    "--served-model-name",
    "--lora-modules",
    "--lora-target-modules",
)  # take several words after one flag
JSON_LISTS = ("--allowed-origins", "--allowed-methods", "--allowed-headers")
NO_FORMS = ("--enable-prefix-caching", "--async-scheduling", "--enable-layer-chain")  # switches that are on unless told


def spelled_out(words: list[str]) -> list[str]:
    """The words of a command as the parser takes them. Those of a `--config` file come first, so that others win."""
    if words[:1] != ["serve"]:
        return words
    words = _with_config(words)
    has_model = len(words) > 1 and not words[1].startswith("-")
    return _repeated(words) if has_model else words


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
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--config"), None)
    if at is None:
        return words
    _, has_value, file = words[at].partition("=")
    if not has_value:
        if at + 1 == len(words):
            return words  # the parser says what is missing
        file = words[at + 1]
    others = words[1:at] + words[at + (1 if has_value else 2) :]
    given = {word.partition("=")[0] for word in others}
    model, flags = _read(file, given)
    named = bool(others) and not others[0].startswith("-")
    return ["serve", *(others[:1] if named else model), *flags, *(others[1:] if named else others)]


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
