"""Adapters of random values, known to an engine under the names "1", "2", …: nothing is read from a file."""

from __future__ import annotations

import torch

from windowpane.engine.adapters import EngineAdapters
from windowpane.lowering.adapters import Adapters, Pair
from windowpane.schedule.adapters import AdapterSlots


def random_adapter(held: Adapters, seed: int, scale: float = 0.05) -> dict[str, Pair]:
    """The same values for every lowering: they are drawn in the checkpoint's order. Not those of other ranks."""
    generator, rank, made = torch.Generator().manual_seed(seed), held.room.rank, {}
    for name, one in held.held.items():
        shape = one.shape

        def pair(outputs: int, inputs: int = shape.inputs) -> Pair:
            a, b = (torch.randn(n, generator=generator) for n in ((rank, inputs), (outputs, rank)))
            return Pair(a / inputs**0.5, scale * b)

        made[name] = one.arranged([[pair(outputs) for outputs in shape.part_outputs] for _ in range(shape.experts)])
    return made


def engine_adapters(held: Adapters, slots: AdapterSlots, count: int) -> EngineAdapters:
    def read(path: str, held: Adapters) -> dict[str, Pair]:
        return random_adapter(held, int(path))

    made = EngineAdapters(held, slots, read)
    for number in range(1, count + 1):
        made.load(str(number), str(number))
    return made
