"""Slots of adapters: held while requests run, exchanged by age, and filled before the step that needs them."""

from __future__ import annotations

import random

from windowpane.schedule.adapters import AdapterSlots


def test_the_least_recently_used_makes_room() -> None:
    slots = AdapterSlots(2)
    assert [slots.take(adapter) for adapter in (7, 8, 7)] == [1, 2, 1]
    assert slots.take_placed() == ((1, 7), (2, 8)) and not slots.take_placed()
    assert not slots.fits(9) and slots.fits(8) and slots.fits(0)
    for adapter in (7, 8, 7):
        slots.give_back(adapter)
    assert slots.take(9) == 2, "8 was used before 7"
    assert slots.take_placed() == ((2, 9),)
    assert slots.take(7) == 1 and not slots.take_placed(), "7 still lies there"


def test_one_that_is_gone_leaves_its_slot() -> None:
    slots = AdapterSlots(1)
    slots.take(7)
    slots.give_back(7)
    slots.forget(7)
    assert not slots.take_placed() and slots.take(7) == 1
    assert slots.take_placed() == ((1, 7),), "nothing is left of it"


def test_a_failed_step_fills_all_of_them_again() -> None:
    slots = AdapterSlots(2)
    slots.take(7)
    slots.take(8)
    slots.take_placed()
    slots.place_again()
    assert dict(slots.take_placed()) == {1: 7, 2: 8}


def test_requests_find_their_own_adapter_in_any_order() -> None:
    random.seed(1)
    slots, lying, running = AdapterSlots(3), {}, []
    for _ in range(2000):
        adapter = random.randrange(7)
        if slots.fits(adapter) and random.random() < 0.5:
            running.append((adapter, slots.take(adapter)))
        elif running:
            slots.give_back(running.pop(random.randrange(len(running)))[0])
        lying |= dict(slots.take_placed())
        assert all(lying.get(slot) == own if own else slot == 0 for own, slot in running)
        assert len({own for own, _ in running} - {0}) <= 3
