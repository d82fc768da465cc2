"""Tables on the device: what a step's changes become, in which order, and without a place named twice."""

from __future__ import annotations

import numpy as np
import torch

from windowpane.device.tables import DeviceTables
from windowpane.kv.changes import Changes, TableUpdate


def update(slot: int, column: int, offsets: list[int]) -> TableUpdate:
    return TableUpdate(0, np.array([slot]), np.array([column]), np.array([offsets], dtype=np.int32))


def apply(tables: DeviceTables, changes: Changes) -> None:
    """As the kernel does, but in an order that shows whether it matters."""
    for updates in tables.updates(changes):
        places, offsets = np.split(updates, 2)
        assert len(set(places.tolist())) == len(places)
        order = np.random.default_rng(0).permutation(len(places))
        tables._flat[torch.from_numpy(places[order].astype(np.int64))] = torch.from_numpy(offsets[order])


def test_a_late_page_is_read_only_after_its_step():
    tables = DeviceTables([(2, 3, 2)], torch.device("cpu"))
    apply(tables, Changes(entries=(update(1, 2, [7, 8]),)))
    apply(tables, Changes(late=(update(1, 2, [70, 80]),)))
    assert tables.reading[0][1, 2].tolist() == [7, 8]
    assert tables.writing[0][1, 2].tolist() == [70, 80]
    apply(tables, Changes())
    assert tables.reading[0][1, 2].tolist() == [70, 80]


def test_a_page_that_is_taken_over_and_replaced_in_one_step_is_read_where_it_was():
    """A sequence resumes at a shared page and slides past it in the same chunk: entries already name the new page."""
    tables = DeviceTables([(2, 3, 1)], torch.device("cpu"))
    new, old = update(0, 1, [50]), update(0, 1, [5])
    apply(tables, Changes(entries=(new,), late=(new,), moved_reads=(old,)))
    assert tables.reading[0][0, 1].tolist() == [5]
    assert tables.writing[0][0, 1].tolist() == [50]


def test_what_the_last_step_left_comes_before_what_this_one_changes():
    tables = DeviceTables([(1, 2, 1)], torch.device("cpu"))
    apply(tables, Changes(late=(update(0, 0, [9]),)))
    apply(tables, Changes(entries=(update(0, 0, [11]),)))
    assert tables.reading[0][0, 0].tolist() == [11]
