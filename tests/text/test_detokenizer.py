"""Text comes piece by piece, in whole characters, and adds up to the text of all tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.models import GEMMA, SMOLLM2, embedded_tokenizer
from windowpane.text import Detokenizer

# SmolLM2's vocabulary lacks some bytes of control and unassigned characters, so that it cannot spell those.
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn")), max_size=50)
BOTH = pytest.mark.parametrize("name", [GEMMA, SMOLLM2])


def pieces(name: str, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(embedded_tokenizer(name), skip_special_tokens)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@BOTH
@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_text_comes_back_in_whole_characters(name: str, text: str) -> None:
    ids = embedded_tokenizer(name).encode(text, add_special_tokens=False)
    parts = pieces(name, ids, skip_special_tokens=False)
    assert "".join(parts) == (text.replace("▁", " ") if name == GEMMA else text)
    assert "\ufffd" not in "".join(parts) or "\ufffd" in text


@BOTH
@given(ids=st.lists(st.one_of(st.integers(0, 600), st.integers(0, 49_151)), max_size=40), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_tokens_add_up_to_their_decoding(name: str, ids: list[int], skip: bool) -> None:
    """Any: also bytes that are no UTF-8, of which the low ids hold many, and special tokens among them."""
    assert "".join(pieces(name, ids, skip)) == embedded_tokenizer(name).decode(ids, skip_special_tokens=skip)


@BOTH
def test_half_a_character_is_held_back(name: str) -> None:
    ids = embedded_tokenizer(name).encode("𓀀", add_special_tokens=False)
    assert len(ids) > 1
    assert pieces(name, ids) == [*[""] * (len(ids) - 1), "𓀀", ""]


@BOTH
def test_a_character_that_never_ends_is_shown_as_broken(name: str) -> None:
    ids = embedded_tokenizer(name).encode("𓀀", add_special_tokens=False)[:-1]
    assert pieces(name, ids) == [*[""] * len(ids), "\ufffd"]


@BOTH
def test_a_leading_space_belongs_to_the_continuation(name: str) -> None:
    ids = embedded_tokenizer(name).encode(" world", add_special_tokens=False)
    assert "".join(pieces(name, ids)) == " world"
