"""The prefix tree against a plain dictionary of sequences."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from windowpane.kv.prefixes import Node, PrefixTree

sequences = st.lists(st.integers(0, 2), min_size=1, max_size=12)
keys = st.sampled_from(["a", "b"])


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree: PrefixTree[int] = PrefixTree()
        self.known: dict[tuple[str, tuple[int, ...]], int] = {}
        self.values = 0

    def _node(self, key: str, tokens: tuple[int, ...]) -> Node[int]:
        shared, node = self.tree.match(key, array(list(tokens)))
        assert node is not None
        assert shared == node.end == len(tokens)
        return node

    @rule(key=keys, tokens=sequences)
    def insert(self, key, tokens):
        node = self.tree.insert(key, array(tokens))
        assert node.end == len(tokens)
        assert node.value == self.known.get((key, tuple(tokens)))
        if node.value is None:
            self.values += 1
            node.value = self.known[key, tuple(tokens)] = self.values

    @rule(pick=st.integers(0, 100))
    def remove(self, pick):
        if self.known:
            key, tokens = list(self.known)[pick % len(self.known)]
            self.tree.remove(self._node(key, tokens))
            del self.known[key, tokens]

    @rule(key=keys, tokens=sequences)
    def match(self, key, tokens):
        shared, node = self.tree.match(key, array(tokens))
        mine = [known for k, known in self.known if k == key]
        assert shared == max((common(tuple(tokens), known) for known in mine), default=0)
        if node is None:
            assert not mine
            return
        on_path = {n.end: n.value for n in node.path() if n.value is not None and n.end <= shared}
        below = {n.value for n in node.below() if n.value is not None and n.end >= shared}
        own = {known: value for (k, known), value in self.known.items() if k == key}
        assert on_path == {len(known): v for known, v in own.items() if known == tuple(tokens[: len(known)])}
        assert below == {v for known, v in own.items() if known[:shared] == tuple(tokens[:shared])}

    @invariant()
    def every_value_is_found_and_nothing_else_is_held(self):
        for (key, tokens), value in self.known.items():
            assert self._node(key, tokens).value == value
        # A tree whose inner nodes all part or hold something has fewer than two nodes per value.
        assert len(self.tree) <= max(0, 2 * len(self.known) - 1)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
