"""What Gluon kernels for Hopper add to `gluon_in_torch`: barriers with phases, boxes copied by TMA, and wgmma.

All of it is as late or as early as the hardware may be, whichever shows more mistakes: a copy spoils its target at once
and lands when somebody waits for it; one from shared memory is made when it is waited for; a product reads its operands
at once, fails if one of them changes before it is waited for, and has no values until then.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.kernels.gluon_in_torch import MOST_SECONDS, Described, Shared, Tensor, copy_async, program

_SPOILED = 0x7F  # in every byte: the largest number in bfloat16, none in float16


class Barriers:
    """An array of mbarriers in shared memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._all = [Barrier() for _ in memory]

    def index(self, at: Any) -> Barrier:
        return self._all[int(at)]


class Barrier:
    """A phase ends when all arrivals of it have come and all bytes that it expects."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._count = self._missing = self._bytes = self._phase = 0

    def init(self, count: int) -> None:
        self._count = self._missing = count

    def arrive(self, *, count: int = 1, pred: Any = True, expected_bytes: int = 0) -> None:
        if not pred:
            return
        with self._changed:
            assert self._missing >= count, "more arrivals than a phase has"
            self._missing -= count
            self._bytes += expected_bytes
            self._end_phase_if_complete()

    def expect(self, bytes: int, pred: Any = True) -> None:
        self.arrive(pred=pred, expected_bytes=bytes)

    def bring(self, box: torch.Tensor, to: torch.Tensor) -> None:
        with self._changed:
            to.view(torch.int8).fill_(_SPOILED)
            self._copies.append((box, to))
            self._changed.notify_all()

    def wait(self, phase: Any, pred: Any = True) -> None:
        """For the end of the phase with this parity; phases before the first one have ended."""
        if not pred:
            return
        until = time.monotonic() + MOST_SECONDS
        with self._changed:
            while self._phase % 2 == int(phase):
                if not self._copies:
                    self._changed.wait(0.02)
                self._land()
                if time.monotonic() > until or program.failures:
                    raise TimeoutError("a phase of a barrier that a warp waits for never ends")

    def _land(self) -> None:
        for box, to in self._copies:
            to.copy_(box)
            self._bytes -= box.nbytes
        self._copies.clear()
        self._end_phase_if_complete()

    def _end_phase_if_complete(self) -> None:
        if self._missing == 0 and self._bytes == 0:
            self._phase, self._missing = self._phase + 1, self._count
            self._changed.notify_all()


class Product:
    """A wgmma in flight; the first operand may be in registers. `sums` may be in flight, too: products of a warp group
    end in their order, so the next one adds to what this one will have given.
    """

    def __init__(self, a: Tensor | Shared, b: Shared, sums: Tensor | Product) -> None:
        if isinstance(sums, Product):
            sums = sums._result
        self._shared = [x.values for x in (a, b) if isinstance(x, Shared)]
        self._read = [x.clone() for x in self._shared]
        self._result = Tensor(sums.values + a.values.float() @ b.values.float())
        self.is_done = False

    def finish(self) -> None:
        for read, there in zip(self._read, self._shared, strict=True):
            same = torch.equal(read.view(torch.int16), there.view(torch.int16))
            assert same, "an operand in shared memory changed while it was multiplied"
        self.is_done = True

    def result(self) -> Tensor:
        return self._result


def _multiply(a: Tensor | Shared, b: Shared, sums: Tensor | Product, *, is_async: bool) -> Product:
    assert is_async and a.values.dtype == b.values.dtype
    program.products = [*getattr(program, "products", []), Product(a, b, sums)]
    return program.products[-1]


def _wait_for_products(most_in_flight: int, deps: list[Any]) -> Any:
    """One result for one dependency, and a tuple for several."""
    time.sleep(1e-3)  # in which a copy that nothing holds back spoils an operand
    done = program.products[: len(program.products) - most_in_flight]
    program.products = program.products[len(done) :]
    for product in done:
        product.finish()
    found = tuple(x.result() if isinstance(x, Product) and x.is_done else x for x in deps)
    return found[0] if len(found) == 1 else found


def _bring(tensor: Described, at: list[Any], barrier: Barrier, to: Shared) -> None:
    barrier.bring(tensor.box(at), to.values)


def _arrive_with_copies(barrier: Barrier, *, increment_count: bool) -> None:
    """Each thread of a warp group, when what it copied is there."""
    assert not increment_count
    barrier.arrive(count=128)


def _take_away(tensor: Described, at: list[Any], box: Shared) -> None:
    program.stores = [*getattr(program, "stores", []), partial(tensor.store, at, box.values)]


def _wait_for_stores(most_in_flight: int) -> None:
    stores = getattr(program, "stores", [])
    program.stores = stores[len(stores) - most_in_flight :]
    for store in stores[: len(stores) - most_in_flight]:
        store()


NAMES: dict[str, Any] = {
    "mbarrier": SimpleNamespace(
        MBarrierLayout=lambda: Barriers, init=Barrier.init, expect=Barrier.expect, arrive=Barrier.arrive,
        wait=Barrier.wait,
    ),
    "tma": SimpleNamespace(
        async_copy_global_to_shared=_bring, async_copy_shared_to_global=_take_away, store_wait=_wait_for_stores
    ),
    "async_copy": SimpleNamespace(async_copy_global_to_shared=copy_async, mbarrier_arrive=_arrive_with_copies),
    "fence_async_shared": lambda: None,
    "warpgroup_mma": _multiply,
    "warpgroup_mma_wait": _wait_for_products,
}  # fmt: skip
