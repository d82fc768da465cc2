"""What Gluon kernels for Hopper add to `gluon_in_torch`: barriers with phases, boxes copied by TMA, and wgmma.

All of it is as late or as early as the hardware may be, whichever shows more mistakes: a copy spoils its target at once
and lands when somebody waits for it; one from shared memory is made when it is waited for; a product reads its operands
at once, fails if one of them changes before it is waited for, and has no values until then.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from tests.kernels.gluon_in_torch import (
    LANGUAGE,
    MOST_SECONDS,
    Described,
    Shared,
    Tensor,
    copy_async,
    program,
    values_of,
)

_SPOILED = 0x7F  # in every byte: the largest number in bfloat16, none in float16


class Columns(Shared):
    """Rows as a swizzle of 128 bytes has them in memory: 64 columns of all rows of a tile, then the next 64.

    The last `rank` dims are a tile; what comes before counts tiles.
    """

    def __init__(self, memory: torch.Tensor, shape: list[int], rank: int) -> None:
        self._memory, self._shape, self._rank = memory, list(shape), rank
        self.type, self.dtype = SimpleNamespace(shape=list(shape)), _Element(memory.dtype)

    @property
    def _places(self) -> torch.Tensor:
        """The memory as [tiles …, rows …, columns / 64, 64]."""
        *tiles, columns = self._shape
        counts, rows = tiles[: len(tiles) + 1 - self._rank], tiles[len(tiles) + 1 - self._rank :]
        return self._memory.view(*counts, columns // 64, *rows, 64).movedim(len(counts), -2)

    @property
    def values(self) -> torch.Tensor:
        return self._places.flatten(-2)

    def put(self, values: torch.Tensor) -> None:
        self._places.copy_(values.reshape(self._shape).unflatten(-1, (-1, 64)))

    def index(self, at: Any) -> Columns:
        count = self._shape[0]
        return Columns(self._memory.view(count, -1)[int(values_of(at))], self._shape[1:], self._rank)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Permuted(self, order)

    def load(self, layout: None = None) -> Tensor:
        return Tensor(self.values.clone())

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Columns:
        assert getattr(dtype, "torch", dtype) == self._memory.dtype
        return Columns(self._memory, shape, layout.rank)


class Permuted(Shared):
    """To be multiplied."""

    def __init__(self, of: Columns, order: tuple[int, ...]) -> None:
        self._of, self._order = of, order

    @property
    def values(self) -> torch.Tensor:
        return self._of.values.permute(self._order)


class _Element(NamedTuple):
    torch: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return 8 * self.torch.itemsize


class ColumnsLayout:
    """Stands in for `NVMMASharedLayout(128, 16, rank)`: says what is made of memory."""

    def __init__(self, swizzle_bytes: int, bits: int, rank: int) -> None:
        assert swizzle_bytes == 128 and bits == 16
        self.rank = rank

    def __call__(self, memory: torch.Tensor) -> Columns:
        return Columns(memory.view(-1), list(memory.shape), self.rank)


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
        self._copies: list[tuple[torch.Tensor, Shared]] = []
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

    def bring(self, box: torch.Tensor, to: Shared) -> None:
        with self._changed:
            to.put(
                torch.full(box.shape, _SPOILED, dtype=torch.int8).repeat_interleave(box.itemsize, -1).view(box.dtype)
            )
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
            to.put(box)
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
        self._shared = [x for x in (a, b) if isinstance(x, Shared)]
        self._read = [x.values.clone() for x in self._shared]
        self._result = Tensor(sums.values + a.values.float() @ b.values.float())
        self.is_done = False

    def finish(self) -> None:
        for read, there in zip(self._read, self._shared, strict=True):
            same = torch.equal(read.view(torch.int16), there.values.view(torch.int16))
            assert same, "an operand in shared memory changed while it was multiplied"
        self.is_done = True

    def result(self) -> Tensor:
        return self._result


def _multiply(
    a: Tensor | Shared, b: Shared, sums: Tensor | Product, *, is_async: bool = False, use_acc: bool = True
) -> Product | Tensor:
    assert a.values.dtype == b.values.dtype
    if not use_acc:
        sums = Tensor(torch.zeros(a.values.shape[0], b.values.shape[1]))
    product = Product(a, b, sums)
    if not is_async:
        assert not getattr(program, "products", [])
        return product.result()
    program.products = [*getattr(program, "products", []), product]
    return product


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
    barrier.bring(tensor.box(at), to)


def _arrive_with_copies(barrier: Barrier, *, increment_count: bool) -> None:
    """Each thread of a warp group, when what it copied is there."""
    assert not increment_count
    barrier.arrive(count=128)


def _take_away(tensor: Described, at: list[Any], box: Shared) -> None:
    program.stores = [*getattr(program, "stores", []), lambda: tensor.store(at, box.values)]


def _wait_for_stores(most_in_flight: int) -> None:
    stores = getattr(program, "stores", [])
    program.stores = stores[len(stores) - most_in_flight :]
    for store in stores[: len(stores) - most_in_flight]:
        store()


def _barriers(memory: torch.Tensor) -> Barrier | Barriers:
    return Barrier() if memory.shape == (1,) else Barriers(memory)


NAMES: dict[str, Any] = {
    "mbarrier": SimpleNamespace(
        MBarrierLayout=lambda: _barriers, init=Barrier.init, expect=Barrier.expect, arrive=Barrier.arrive,
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
# For kernels that take tiles apart by their columns.
WITH_COLUMNS = NAMES | {"gl": SimpleNamespace(**(vars(LANGUAGE) | {"NVMMASharedLayout": ColumnsLayout}))}
