"""Adapters that requests can name: read once, kept on the host of every rank, and placed on devices as requests run."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from windowpane.kv.tier import HostTier
from windowpane.parallel.messages import AddAdapter, RemoveAdapter
from windowpane.schedule.adapters import AdapterSlots
from windowpane.schedule.request import Request

if TYPE_CHECKING:
    from windowpane.lowering.adapters import Adapters, Pair
    from windowpane.parallel.launch import Workers


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by vLLM's names: requests with the same `lora_int_id` share it. `lora_path` is a directory that PEFT
    has saved.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id is a number from 1 on, not {self.lora_int_id!r}")
        if not self.lora_name or not self.lora_path:
            raise ValueError("an adapter has a lora_name and a lora_path")


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """`number` is what requests have as their `adapter`: no other adapter ever gets it, under the same name or not."""

    name: str
    path: str
    number: int


class EngineAdapters:
    """All that are loaded, by name: `held` is rank 0's. Methods are for the engine's thread, `read` for any."""

    def __init__(
        self,
        held: Adapters,
        slots: AdapterSlots,
        read: Callable[[str, Adapters], dict[str, Pair]],
        workers: Workers | None = None,
        tier: HostTier | None = None,
    ) -> None:
        self._held, self._slots, self._read, self._workers, self._tier = held, slots, read, workers, tier
        self._contents: dict[str, str] = {}  # of those that were read and not added yet, by path
        self._numbers = count(1)
        self._loaded: dict[str, LoadedAdapter] = {}
        self._known: set[int] = set()
        self._leaving: set[int] = set()
        self._requests: Counter[int] = Counter()  # that were queued and have not ended, by adapter

    @property
    def loaded(self) -> Mapping[str, LoadedAdapter]:
        return self._loaded

    @property
    def names(self) -> dict[int, str]:
        """By number, of those that requests can name."""
        return {adapter.number: adapter.name for adapter in self._loaded.values()}

    @property
    def slots(self) -> int:
        """How many can run at once."""
        return self._slots.count

    def is_known(self, number: int) -> bool:
        return number in self._known

    def read(self, path: str | Path) -> dict[str, Pair]:
        """An adapter from its directory, for `add`. Raises AdapterError for one that cannot be used."""
        read = self._read(str(path), self._held)
        if self._tier is not None and self._tier.has_disk:
            self._contents[str(path)] = _content(Path(path))
        return read

    def add(self, name: str, path: str | Path, read: dict[str, Pair]) -> LoadedAdapter:
        """Make one that was read known to all ranks."""
        if name in self._loaded:
            raise ValueError(f"the adapter {name!r} is loaded already, from {self._loaded[name].path}")
        adapter = LoadedAdapter(name, str(path), next(self._numbers))
        self._held.know(adapter.number, read)
        if self._tier is not None and (content := self._contents.pop(str(path), None)) is not None:
            self._tier.know_adapter(adapter.number, content)
        if self._workers is not None:
            self._workers.send(AddAdapter(adapter.number, str(Path(path).resolve())))
        self._loaded[name] = adapter
        self._known.add(adapter.number)
        return adapter

    def load(self, name: str, path: str | Path) -> LoadedAdapter:
        return self.add(name, path, self.read(path))

    def remove(self, name: str) -> None:
        """No request can name it any more. Those that did go on; then its memory is given back."""
        self._leaving.add(self._loaded.pop(name).number)
        self.sweep()

    def leave(self) -> dict[int, dict[str, Pair]]:
        """The runner goes, and its slots with it. What was read stays on the host, for `enter`."""
        known = self._held.known
        del self._held
        return known

    def enter(self, held: Adapters, known: dict[int, dict[str, Pair]]) -> None:
        """Another runner of the same model is there."""
        held.known |= known
        self._held = held
        self._slots.place_again()

    def queued(self, request: Request) -> None:
        if request.adapter:
            self._requests[request.adapter] += 1

    def ended(self, request: Request) -> None:
        if request.adapter:
            self._requests[request.adapter] -= 1

    def sweep(self) -> None:
        """Forget those that were removed and that nobody uses any more."""
        for number in [n for n in self._leaving if not self._requests[n] and not self._slots.is_used(n)]:
            self._leaving.remove(number)
            self._known.remove(number)
            self._slots.forget(number)
            self._held.forget(number)
            if self._workers is not None:
                self._workers.send(RemoveAdapter(number))


def _content(path: Path) -> str:
    """What an adapter's files hold: after a restart its number may be another one's."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("adapter_*")):
        digest.update(f"{file.name}\n{file.stat().st_size}\n".encode())
        with file.open("rb") as data:
            while block := data.read(2**20):
                digest.update(block)
    return digest.hexdigest()
