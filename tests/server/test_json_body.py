"""Bodies are read strictly, and large ones in pieces between which the event loop does other things."""

from __future__ import annotations

import asyncio
import json

import pytest

from windowpane.server.errors import ApiError
from windowpane.server.json_body import COUNTED_BYTES, JOINED_PIECES, check_size, slow_json, strict_json
from windowpane.server.turnstile import Turnstile


class TestSize:
    def test_a_large_body_is_counted_in_pieces(self) -> None:
        """Values and then names, each piece in a turn of its own."""
        body = b'{"a": "x' + b":" * 3 * COUNTED_BYTES + b'"}'

        async def turns() -> int:
            count, turn = asyncio.create_task(_check(body, names=1)), 0
            while not count.done():
                await asyncio.sleep(0)
                turn += 1
            await count
            return turn

        assert asyncio.run(turns()) >= 2 * 4

    @pytest.mark.parametrize("space", [b"", b" ", b"\n\t"])
    def test_names_are_counted_across_pieces(self, space: bytes) -> None:
        name = b'"a"' + space + b":1,"
        count = 2 * COUNTED_BYTES // len(name)
        body = b"{" + name * count + b'"b":1}'
        asyncio.run(_check(body, names=count + 1))
        with pytest.raises(ApiError, match="names of fields"):
            asyncio.run(_check(body, names=count - 3))  # one may be lost between two pieces

    def test_names_in_texts_are_none(self) -> None:
        asyncio.run(_check(rb'{"a": "\"b\": \"c\": \"d\":"}', names=1))


async def _check(body: bytes, names: int) -> None:
    await check_size(body, len(body), names, Turnstile(1))


class TestLoneSurrogates:
    @pytest.mark.parametrize(
        "text", [r'"\ud800"', r'{"\udfff": 1}', r'[1, {"a": ["b", "x\ud83d"]}]', r'["\ud83d\ude00", "\ude00\ud83d"]']
    )
    def test_they_are_refused_wherever_they_are(self, text: str) -> None:
        for given in (text, text.encode()):
            with pytest.raises(ApiError, match="lone surrogate"):
                strict_json(given)

    def test_encoded_ones_are_refused_too(self) -> None:
        with pytest.raises(ApiError, match="lone surrogate"):
            strict_json(b'"\xed\xa0\x80"')

    @pytest.mark.parametrize("text", [r'"\ud83d\ude00"', r'"\\ud800"', r'{"a\\ud800": [null, true, 1.5, "é"]}'])
    def test_what_only_looks_like_one_is_read(self, text: str) -> None:
        assert strict_json(text) == strict_json(text.encode())

    def test_depth_makes_no_difference(self) -> None:
        depth = 600
        assert strict_json("[" * depth + r'"\\ud800"' + "]" * depth)
        with pytest.raises(ApiError, match="lone surrogate"):
            strict_json("[" * depth + r'"\ud800"' + "]" * depth)


@pytest.mark.parametrize("numbers", [0, 1, JOINED_PIECES // 2, 3 * JOINED_PIECES])
def test_large_answers_are_whole(numbers: int) -> None:
    """They are written and joined some pieces at a time."""
    document = {"text": "é", "numbers": list(range(numbers))}
    assert json.loads(slow_json(document)) == document


@pytest.mark.parametrize(
    "text",
    ["-0", "-0.0", "1e-400", "0.1234567890123456789", '{"a": 1, "a": 2}', " [1, 2.5E3]\n", "[" * 400 + "]" * 400],
)
def test_what_is_read_is_what_python_reads(text: str) -> None:
    assert repr(strict_json(text)) == repr(json.loads(text)) == repr(strict_json(text.encode("utf-16")))


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "01", "[1,]", "'a'", '"\x01"', "1 2", "", "9" * 4301])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises((ApiError, ValueError)):
        strict_json(text)
