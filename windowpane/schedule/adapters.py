"""Which adapters lie in the device's slots. A request is admitted once its adapter has a slot, and holds it while it
runs; of those that nobody holds, the least recently used makes room for another.
"""

from __future__ import annotations

from collections import OrderedDict


class AdapterSlots:
    """Slots are counted from 1; adapter 0 is none and needs no slot."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count, 0, -1))
        self._slots: OrderedDict[int, int] = OrderedDict()  # by adapter, least recently used first
        self._users: dict[int, int] = {}  # requests that run, by adapter
        self._placed: dict[int, int] = {}  # adapters by slot, filled since the last step

    def fits(self, adapter: int) -> bool:
        """Whether a request with this adapter can be admitted now."""
        return not adapter or adapter in self._slots or bool(self._free) or self._unused() is not None

    def take(self, adapter: int) -> int:
        """The slot of a request's adapter, which it holds until `give_back`; one that does not lie there is placed."""
        if not adapter:
            return 0
        if adapter not in self._slots:
            unused = None if self._free else self._unused()
            assert self._free or unused is not None, "`fits` says whether there is a slot"
            slot = self._free.pop() if unused is None else self._slots.pop(unused)
            self._slots[adapter], self._placed[slot] = slot, adapter
        self._slots.move_to_end(adapter)
        self._users[adapter] = self._users.get(adapter, 0) + 1
        return self._slots[adapter]

    def give_back(self, adapter: int) -> None:
        if adapter:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]

    def is_used(self, adapter: int) -> bool:
        return adapter in self._users

    def forget(self, adapter: int) -> None:
        """An adapter that nobody uses is gone."""
        slot = self._slots.pop(adapter, None)
        if slot is not None:
            self._placed.pop(slot, None)
            self._free.append(slot)

    def place_again(self) -> None:
        """A step failed, perhaps before it had filled its slots: the next one fills all that hold an adapter."""
        self._placed = {slot: adapter for adapter, slot in self._slots.items()}

    def take_placed(self) -> tuple[tuple[int, int], ...]:
        """(slot, adapter) to be filled before the next step."""
        placed, self._placed = tuple(self._placed.items()), {}
        return placed

    def _unused(self) -> int | None:
        return next((adapter for adapter in self._slots if adapter not in self._users), None)
