"""The tokenizers of both embedded models, built once per process: Gemma's takes seconds."""

from __future__ import annotations

from functools import cache

from windowpane.models.embedded import embedded_path
from windowpane.text import Tokenizer, load_tokenizer


@cache
def embedded_tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(embedded_path(name))


GEMMA, SMOLLM2 = "gemma-3-270m", "smollm2-135m-instruct"
