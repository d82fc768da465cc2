"""Restore points by what they hold: the key (a tenant's salt) and the tokens before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from windowpane.kv.prefixes import Node, PrefixTree, Tokens
from windowpane.kv.sharing import RestorePoint

NEAREST = 32  # restore points below the place where a prompt parts that are asked whether they reach back to it

# The longest length up to a limit at which a restore point can be resumed.
LongestResume = Callable[[RestorePoint, int], int]
OnChange = Callable[[RestorePoint], None]


@dataclass(frozen=True, slots=True)
class Found:
    """Where a sequence of `tokens` tokens parts from all others in an index: after `common` of them."""

    tokens: int
    common: int
    node: Node[RestorePoint] | None

    @property
    def exact(self) -> RestorePoint | None:
        """The restore point at the end of exactly these tokens."""
        is_there = self.node is not None and self.common == self.node.end == self.tokens
        return self.node.value if is_there and self.node is not None else None

    def near(self) -> Iterator[RestorePoint]:
        """The points before that place, the nearest first, and then those next behind it."""
        if self.node is not None:
            for other in (*self.node.path(), *islice(self.node.below(), NEAREST)):
                if other.value is not None:
                    yield other.value

    def longest(self, limit: int, resume: LongestResume) -> tuple[int, RestorePoint | None]:
        """The restore point from which the most of the first `limit` tokens can be resumed, and how many."""
        best: tuple[int, RestorePoint | None] = (0, None)
        for point in self.near():
            if not point.pending and (length := resume(point, min(self.common, limit))) > best[0]:
                best = (length, point)
        return best


class PointIndex:
    """The restore points of one tier."""

    def __init__(self) -> None:
        self._tree: PrefixTree[RestorePoint] = PrefixTree()
        self._nodes: dict[RestorePoint, Node[RestorePoint]] = {}
        self._listeners: list[tuple[OnChange, OnChange]] = []

    def listen(self, on_put: OnChange, on_remove: OnChange) -> None:
        """Hear of every point that is entered, right after, and of every one that is removed, right before."""
        self._listeners.append((on_put, on_remove))

    def find(self, key: str, tokens: Tokens) -> Found:
        return Found(len(tokens), *self._tree.match(key, tokens))

    def put(self, key: str, tokens: Tokens, point: RestorePoint) -> None:
        """Enter a point at the end of these tokens, where there is none."""
        node = self._tree.insert(key, tokens)
        assert node.value is None and len(tokens) == point.length
        node.value = point
        self._nodes[point] = node
        for on_put, _ in self._listeners:
            on_put(point)

    def remove(self, point: RestorePoint) -> None:
        for _, on_remove in self._listeners:
            on_remove(point)
        self._tree.remove(self._nodes.pop(point))

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, point: RestorePoint) -> bool:
        return point in self._nodes

    def points(self) -> list[RestorePoint]:
        return list(self._nodes)

    def content(self, point: RestorePoint) -> tuple[str, Tokens]:
        """The key and the tokens of a point that was entered."""
        node = self._nodes[point]
        edges = [node.edge]
        while node.parent is not None:
            node = node.parent
            edges.append(node.edge)
        return str(self._tree.key_of(node)), np.frombuffer(b"".join(edges[::-1]), dtype=np.int32)

    def worth(self, point: RestorePoint) -> float:
        """Tokens that would be computed again without it: those since the restore point before it."""
        node = self._nodes.get(point)
        if node is None:
            return point.length
        before = node.parent
        while before is not None and before.value is None:
            before = before.parent
        return node.end - (before.end if before is not None else 0)
