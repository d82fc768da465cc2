"""Words that are never said and thoughts that end, with and without a grammar beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.tiny_model import EOS, make_model
from windowpane.schedule.request import SamplingParams
from windowpane.text import Tokenizer, load_tokenizer
from windowpane.text.grammar import GrammarError, Grammars, Thought
from windowpane.text.rules import RuleMatcher, ThoughtBudget, with_rules

VOCABULARY = 258


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = make_model(tmp_path_factory.mktemp("models") / "tiny")
    return load_tokenizer(path)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def matcher(tokenizer: Tokenizer, *words: str, budget: ThoughtBudget | None = None, grammar=None) -> RuleMatcher:  # type: ignore[no-untyped-def]
    params = SamplingParams(bad_words=words, stop_token_ids=(EOS,))
    rules = with_rules(grammar, params, tokenizer, VOCABULARY, budget)
    assert rules is not None
    return rules.matcher()  # type: ignore[return-value]


def allowed(given: RuleMatcher, *, may_stop: bool = True) -> set[int]:
    bits = np.unpackbits(given.allowed(may_stop=may_stop).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCABULARY]).tolist())


def test_without_rules_nothing_changes(tokenizer: Tokenizer) -> None:
    assert with_rules(None, SamplingParams(), tokenizer, VOCABULARY) is None


def test_the_last_token_of_a_word_is_not_said_behind_the_others(tokenizer: Tokenizer) -> None:
    said = matcher(tokenizer, "cat", "x")
    everything, (x,), (t,) = set(range(VOCABULARY)), ids(tokenizer, "x"), ids(tokenizer, "t")
    assert allowed(said) == everything - {x}
    for token in ids(tokenizer, "ca"):
        said.accept(token)
    assert allowed(said) == everything - {x, t}
    said.accept(ids(tokenizer, "r")[0])
    assert allowed(said) == everything - {x}
    assert allowed(said, may_stop=False) == everything - {x, EOS}


def test_a_grammar_beside_them_holds_too(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)
    try:
        assert allowed(matcher(tokenizer, "b", grammar=grammars.regex("[abc]"))) == set(ids(tokenizer, "ac"))
        with pytest.raises(GrammarError, match="leave no token"):
            matcher(tokenizer, "b", grammar=grammars.regex("b")).allowed(may_stop=False)
    finally:
        grammars.close()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_thought_is_ended_when_its_budget_is_spent(tokenizer: Tokenizer, is_open: bool) -> None:
    said = matcher(tokenizer, budget=ThoughtBudget(Thought("<a>", "</a>", is_open), 3))
    for token in ids(tokenizer, ("" if is_open else "<a>") + "xyz"):
        assert len(allowed(said)) == VOCABULARY
        said.accept(token)
    for token in ids(tokenizer, "</a>"):
        assert allowed(said) == {token}
        said.accept(token)
    assert len(allowed(said)) == VOCABULARY


def test_one_that_ends_in_time_is_left_alone(tokenizer: Tokenizer) -> None:
    said = matcher(tokenizer, budget=ThoughtBudget(Thought("<a>", "</a>", True), 6))
    for token in ids(tokenizer, "x</a>yyyyyyyy"):
        assert len(allowed(said)) == VOCABULARY
        said.accept(token)


def test_words_need_a_tokenizer() -> None:
    with pytest.raises(GrammarError, match="logit_bias"):
        with_rules(None, SamplingParams(bad_words="a"), None, VOCABULARY)
