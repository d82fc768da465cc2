"""`--speculative-config`: which drafter, and how many tokens it may draft. Knows neither torch nor NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

METHODS = ("ngram", "mtp", "draft_model")
MOST_DRAFTS = 15  # of one sequence in a step: 16 rows with its own token
LONGEST_NGRAM, SHORTEST_NGRAM = 5, 2  # where the config names neither


class DraftConfigError(ValueError):
    """A speculative config that cannot work; the message names the value and what works instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """By the names of vLLM's `--speculative-config`.

    `ngram` looks the last `prompt_lookup_max` tokens up in the request's own prompt and answer, then fewer, down to
    `prompt_lookup_min`, and drafts what followed there. Where only one of the two is given, it is both. `mtp` runs the
    layer for multi-token prediction that the checkpoint carries, or the assistant that `model` names; `draft_model` any
    smaller model of that name.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise DraftConfigError(
                f"--speculative-config: method {self.method!r} is not known; use {' or '.join(METHODS)}"
            )
        if self.method == "draft_model" and self.model is None:
            raise DraftConfigError(
                "--speculative-config: method 'draft_model' needs model, a smaller model to draft with"
            )
        if self.method == "ngram" and self.model is not None:
            raise DraftConfigError(f"--speculative-config: method 'ngram' takes no model, and {self.model!r} is given")
        _check_count("num_speculative_tokens", self.num_speculative_tokens, MOST_DRAFTS)
        for name in ("prompt_lookup_max", "prompt_lookup_min"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        longest, shortest = self.ngram_tokens
        if longest < shortest:
            raise DraftConfigError(
                f"--speculative-config: prompt_lookup_max {longest} is below prompt_lookup_min {shortest}"
            )

    @property
    def ngram_tokens(self) -> tuple[int, int]:
        """The longest and the shortest run of tokens that is looked up."""
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        if longest is None and shortest is None:
            return LONGEST_NGRAM, SHORTEST_NGRAM
        return longest or shortest or 0, shortest or longest or 0

    @classmethod
    def of(cls, given: DraftConfig | Mapping[str, Any] | str) -> DraftConfig:
        """From a config, a mapping, or the JSON text of one. Keys that are not known are errors."""
        if isinstance(given, DraftConfig):
            return given
        if isinstance(given, str):
            given = _from_json(given)
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise DraftConfigError(f"--speculative-config: {name!r} is not known; use {', '.join(known)}")
        for name in ("method", "num_speculative_tokens"):
            if name not in given:
                raise DraftConfigError(
                    f'--speculative-config needs {name}, as in {{"method": "ngram", "num_speculative_tokens": 4}}'
                )
        return cls(**given)


def tokens_each(given: DraftConfig | Mapping[str, Any] | str | None) -> int:
    """Tokens that a step has of each running sequence: one, and its drafts."""
    return 1 if given is None else 1 + DraftConfig.of(given).num_speculative_tokens


def _from_json(text: str) -> Mapping[str, Any]:
    try:
        read = json.loads(text)
    except ValueError as error:
        raise DraftConfigError(f"--speculative-config is no JSON: {error}") from None
    if not isinstance(read, dict):
        raise DraftConfigError(f"--speculative-config is a JSON object, not {text}")
    return read


def _check_count(name: str, value: object, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        bounds = "a whole number from 1 on" if most is None else f"a whole number from 1 to {most}"
        raise DraftConfigError(f"--speculative-config: {name} is {bounds}, not {value!r}")
