"""Stop strings cut text before they are shown, however the text is cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windowpane.text import StopStrings, TextError

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
TEXT = st.text("abc", max_size=25)


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    filter_ = StopStrings(stops, include)
    shown = "".join([*(filter_.push(piece) for piece in pieces), filter_.finish()])
    return shown, filter_.matched


def by_the_rule(stops: list[str], text: str, include: bool = False) -> tuple[str, str | None]:
    """The definition, character by character: the first complete stop, and of several the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(STOPS, st.lists(st.text("abc", max_size=4), max_size=12), st.booleans())
def test_any_cut_gives_what_the_rule_gives(stops: list[str], pieces: list[str], include: bool) -> None:
    assert run(stops, pieces, include) == by_the_rule(stops, "".join(pieces), include)


@given(STOPS, st.lists(st.text("abc", max_size=3), max_size=12))
def test_what_is_shown_is_never_taken_back_and_no_more_is_held_than_needed(stops: list[str], pieces: list[str]) -> None:
    filter_, shown, text = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        shown += filter_.push(piece)
        assert text.startswith(shown)
        held = text[len(shown) :]
        if filter_.matched is None and held:
            assert any(stop.startswith(held) for stop in stops)
    assert by_the_rule(stops, text)[0].startswith(shown)


def test_a_stop_across_pieces_is_never_seen() -> None:
    filter_ = StopStrings(["\nUser:"])
    assert [filter_.push(piece) for piece in ("Hello", "\nUs", "er", ": hi")] == ["Hello", "", "", ""]
    assert filter_.matched == "\nUser:"
    assert filter_.finish() == ""


def test_a_beginning_that_comes_to_nothing_is_shown_late() -> None:
    filter_ = StopStrings(["###"])
    assert [filter_.push(piece) for piece in ("a #", "# b", "##")] == ["a ", "## b", ""]
    assert filter_.finish() == "##"
    assert filter_.matched is None


def test_text_after_a_stop_is_dropped() -> None:
    filter_ = StopStrings(["x"])
    assert (filter_.push("axb"), filter_.push("c"), filter_.finish()) == ("a", "", "")


@given(TEXT)
def test_without_stops_nothing_is_held(text: str) -> None:
    filter_ = StopStrings([])
    assert [filter_.push(c) for c in text] == list(text)


def test_an_empty_stop_is_an_error() -> None:
    with pytest.raises(TextError, match="empty"):
        StopStrings(["a", ""])
