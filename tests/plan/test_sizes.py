from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windowpane.plan.sizes import format_bytes, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("123456", 123_456),
        ("512B", 512),
        ("64KiB", 64 * 1024),
        ("1 MiB", 1024**2),
        ("11.54GiB", 12_390_980_648),
        ("64.74 GiB", 64_74 * 1024**3 // 100),
        ("  24GB ", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("24gib", 24 * 1024**3),
        ("1.5TB", 15 * 10**11),
        ("2TiB", 2 * 1024**4),
        ("1.GiB", 1024**3),
        ("80g", 80 * 10**9),
        ("80G", 80 * 1024**3),
        ("25.6k", 25_600),
        ("1K", 1024),
    ],
)
def test_byte_sizes_are_read(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", " ", "GiB", "-1GiB", "+1GiB", "1e9", "nan", "inf", "1.2.3GiB", "1,5GiB", "11GiB/s", "½GiB", "٣GiB"]
)
def test_nonsense_sizes_are_repeated_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"11\.54GiB") as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.0 MB", "0.5"])
def test_sizes_below_one_byte_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="less than one byte"):
        parse_bytes(text)


def test_an_unknown_unit_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown unit 'XB' in size '12XB'.*24GB"):
        parse_bytes("12XB")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("131072", 131_072), ("128k", 128_000), ("128K", 131_072), ("25.6k", 25_600), ("1.5K", 1536), ("1M", 2**20)],
)
def test_token_counts_mean_what_they_mean_in_vllm(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "-5", "1.5", "0.1K", "128GiB", "many", "nan"])
def test_bad_token_counts_are_repeated_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"128K \(= 131,072\)") as error:
        parse_tokens(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (69_510_103_040, "64.74 GiB"),
        (5 * 1024**4, "5.00 TiB"),
        (5000 * 1024**4, "5000.00 TiB"),
        (-1536, "-1.50 KiB"),
        (-7, "-7 B"),
    ],
)
def test_bytes_are_written_for_people(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(1, 2**60))
def test_what_is_written_reads_back_within_its_last_digit(size_bytes: int) -> None:
    text = format_bytes(size_bytes)
    last_digit = 0 if text.endswith(" B") else parse_bytes(f"1 {text.split()[1]}") // 100
    assert abs(parse_bytes(text) - size_bytes) <= last_digit
