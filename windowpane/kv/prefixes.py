"""A tree of token sequences: which known sequences begin as a new one does, and how far.

An edge holds the tokens between two nodes; a node is where sequences part or where a value is kept. Tokens are compared
as bytes, so a lookup costs a memory comparison per edge, and two different sequences never pass for the same.

    root ── "You are a" ──┬── "poet. …"    ● value
                          └── "lawyer. …"  ● value
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
V = TypeVar("V")
TOKEN_BYTES = 4


class Node(Generic[V]):
    """The end of an edge: the sequence of `end` tokens that leads here, and the value kept for it, if any."""

    __slots__ = ("children", "edge", "end", "parent", "value")

    def __init__(self, parent: Node[V] | None, edge: bytes) -> None:
        self.parent = parent
        self.edge = edge  # tokens since the parent, as int32
        self.end: int = len(edge) // TOKEN_BYTES + (parent.end if parent is not None else 0)
        self.children: dict[int, Node[V]] = {}
        self.value: V | None = None

    @property
    def first_token(self) -> int:
        return int.from_bytes(self.edge[:TOKEN_BYTES], sys.byteorder, signed=True)

    def path(self) -> Iterator[Node[V]]:
        """This node and those above it, the root excepted."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator[Node[V]]:
        """This node and all below it, the nearest first."""
        layer = [self]
        while layer:
            yield from layer
            layer = [child for node in layer for child in node.children.values()]


class PrefixTree(Generic[V]):
    """Values by token sequence. Sequences under different keys have nothing in common."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node[V]] = {}
        self._keys: dict[Node[V], Hashable] = {}  # of the roots

    def match(self, key: Hashable, tokens: Tokens) -> tuple[int, Node[V] | None]:
        """How many leading tokens some sequence under `key` shares, and the node at or next below that point."""
        node = self._roots.get(key)
        if node is None:
            return 0, None
        known = tokens.astype(np.int32, copy=False).tobytes()
        while node.end < len(tokens):
            child = node.children.get(int(tokens[node.end]))
            if child is None:
                break
            if not known.startswith(child.edge, TOKEN_BYTES * node.end):
                return node.end + _common(child.edge, known[TOKEN_BYTES * node.end :]), child
            node = child
        return node.end, node

    def insert(self, key: Hashable, tokens: Tokens) -> Node[V]:
        """The node of this sequence, made if need be. One that gets no value has to be `remove`d again."""
        node = self._roots.get(key) or self._new_root(key)
        known = tokens.astype(np.int32, copy=False).tobytes()
        while node.end < len(tokens):
            first = int(tokens[node.end])
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = Node(node, known[TOKEN_BYTES * node.end :])
                return child
            if known.startswith(child.edge, TOKEN_BYTES * node.end):
                node = child
            else:
                node = self._split(child, _common(child.edge, known[TOKEN_BYTES * node.end :]))
        return node

    def remove(self, node: Node[V]) -> None:
        """Forget a node's value, and the tokens that only led to it."""
        node.value = None
        while node.parent is not None and node.value is None and not node.children:
            del node.parent.children[node.first_token]
            node = node.parent
        if node.parent is None:
            if not node.children:
                del self._roots[self._keys.pop(node)]
        elif node.value is None and len(node.children) == 1:
            self._merge(node)

    def key_of(self, root: Node[V]) -> Hashable:
        """The key that the sequences from this root are under."""
        return self._keys[root]

    def __len__(self) -> int:
        """Nodes, roots excepted."""
        return sum(1 for root in self._roots.values() for node in root.below()) - len(self._roots)

    def _new_root(self, key: Hashable) -> Node[V]:
        root: Node[V] = Node(None, b"")
        self._roots[key], self._keys[root] = root, key
        return root

    def _split(self, child: Node[V], at: int) -> Node[V]:
        """A new node in the middle of an edge."""
        assert child.parent is not None
        middle = Node(child.parent, child.edge[: TOKEN_BYTES * at])
        child.parent.children[middle.first_token] = middle
        child.edge = child.edge[TOKEN_BYTES * at :]
        child.parent = middle
        middle.children[child.first_token] = child
        return middle

    def _merge(self, node: Node[V]) -> None:
        """Make one edge of the two at a node where nothing is kept and nothing parts."""
        assert node.parent is not None
        (child,) = node.children.values()
        child.edge = node.edge + child.edge
        child.parent = node.parent
        node.parent.children[child.first_token] = child


def _common(a: bytes, b: bytes) -> int:
    """Leading tokens that are equal, of two that differ or of which one begins with the other."""
    most = min(len(a), len(b))
    differs = np.frombuffer(a[:most], np.int32) != np.frombuffer(b[:most], np.int32)
    first = int(differs.argmax()) if most else 0
    return first if most and differs[first] else most // TOKEN_BYTES
