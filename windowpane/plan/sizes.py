"""Byte sizes and token counts as people type them, and as people like to read them.

Two families of suffix, and the difference matters:

- units that end in `B` are read without regard to case: `KiB MiB GiB TiB` are powers of 1024, `KB MB GB TB` of 1000;
- a single letter keeps the meaning it has in `vllm serve`: lower case is decimal (`24g` = 24,000,000,000,
  `128k` = 128,000) and upper case is binary (`24G` = 24 GiB, `128K` = 131,072).

Arithmetic is on integers, so `11.54GiB` is exact; a fraction of a byte is dropped, a fraction of a token is an error.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\s*([0-9]+)(?:\.([0-9]*))?\s*([A-Za-z]*)\s*")

_LETTERS: dict[str, int] = {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
_LETTERS |= {letter: 1024**power for power, letter in enumerate("KMGT", 1)}
_BYTE_UNITS: dict[str, int] = {"b": 1}
_BYTE_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
_BYTE_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
_READ_UNITS = ("KiB", "MiB", "GiB", "TiB")

_SIZE_HELP = "write a positive size such as 11.54GiB, 24GB, 24G (= 24 GiB), 24g (= 24 GB) or 12884901888"
_COUNT_HELP = "write a positive whole number such as 131072, 128K (= 131,072) or 128k (= 128,000)"


def parse_bytes(text: str) -> int:
    """`text` as a number of bytes, at least 1. Raises ValueError that repeats `text` and shows what works."""
    number, divisor, unit = _split(text, "size", _SIZE_HELP)
    scale = 1 if not unit else _LETTERS.get(unit) or _BYTE_UNITS.get(unit.lower())
    if scale is None:
        raise ValueError(f"unknown unit {unit!r} in size {text!r}; {_SIZE_HELP}")
    size_bytes = number * scale // divisor
    if size_bytes < 1:
        raise ValueError(f"size {text!r} is less than one byte; {_SIZE_HELP}")
    return size_bytes


def parse_gib(value: float | str) -> int:
    """As `parse_bytes`, but a number without a unit is in GiB."""
    text = str(value)
    return parse_bytes(f"{text}GiB" if text.strip()[-1:] in "0123456789." else text)


def parse_tokens(text: str) -> int:
    """`text` as a number of tokens, at least 1. Raises ValueError that repeats `text` and shows what works."""
    number, divisor, unit = _split(text, "token count", _COUNT_HELP)
    scale = 1 if not unit else _LETTERS.get(unit)
    if scale is None:
        raise ValueError(f"unknown suffix {unit!r} in token count {text!r}; {_COUNT_HELP}")
    tokens, fraction = divmod(number * scale, divisor)
    if fraction or tokens < 1:
        raise ValueError(f"{text!r} is no positive whole number of tokens; {_COUNT_HELP}")
    return tokens


def format_bytes(size_bytes: int) -> str:
    """Two decimals in the largest binary unit that keeps the number at least 1; whole bytes below 1 KiB; sign kept."""
    magnitude = abs(size_bytes)
    if magnitude < 1024:
        return f"{size_bytes} B"
    sign = "-" if size_bytes < 0 else ""
    value = magnitude / 1024
    for unit in _READ_UNITS[:-1]:
        # 1,023.999 KiB would print as 1024.00 KiB: it is a MiB to the reader.
        if round(value, 2) < 1024:
            return f"{sign}{value:.2f} {unit}"
        value /= 1024
    return f"{sign}{value:.2f} {_READ_UNITS[-1]}"


def _split(text: str, what: str, way_out: str) -> tuple[int, int, str]:
    """(digits without the point, the power of ten to divide them by, suffix)."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot read {what} {text!r}; {way_out}")
    whole, decimals, unit = match[1], match[2] or "", match[3]
    return int(whole + decimals), int(10 ** len(decimals)), unit
