"""Runs the source of Gluon kernels in torch: every program is a thread, and a tensor is a torch tensor.

Layouts say where values lie and not which they are, so they are left out; inline PTX, which sees a few values of a
thread at once, is done for whole tensors. Only what kernels here need is here; `hopper_in_torch` has what those for
Hopper add. Programs really run beside each other, as do the warps of one that is specialised, so that one may wait for
another's results, and fails where these never come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MappingProxyType, SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import ConstexprFunction, JITFunction

from tests.kernels.ptx_in_torch import run_elementwise

MOST_SECONDS = 60.0  # that a program waits for another
NOT_WRITTEN = -1

program = threading.local()
_atomic = threading.Lock()


class Tensor:
    """A kernel's tensor: operators are torch's, and numbers of Python take its dtype."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.dtype = values.dtype
        self.type = SimpleNamespace(shape=list(values.shape), layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:
        if bitcast:
            return Tensor(self.values.view(dtype))
        found = self.values.to(dtype)
        if (self.dtype, dtype) == (torch.float32, torch.bfloat16):
            found.view(torch.int16)[found.isnan()] = 0x7FFF  # as `cvt.rn.bf16.f32` has it; torch may set every bit
        return Tensor(found)

    def reshape(self, shape: list[int]) -> Tensor:
        return Tensor(self.values.reshape(shape))

    def __getitem__(self, at: Any) -> Tensor:
        return Tensor(self.values[at])

    def __bool__(self) -> bool:
        return bool(self.values)

    def __index__(self) -> int:
        return int(self.values)

    def __invert__(self) -> Tensor:
        return Tensor(~self.values)

    def __neg__(self) -> Tensor:
        return Tensor(-self.values)


def _operator(name: str) -> Callable[[Tensor, Any], Tensor]:
    def apply(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Tensor(getattr(self.values, name)(values_of(other)))

    return apply


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod",
              "rmod", "and", "or", "lshift", "rshift", "lt", "gt", "le", "ge", "eq"):  # fmt: skip
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))


def values_of(x: Any) -> Any:
    return x.values if isinstance(x, Tensor) else x


class Pointer:
    """A tensor in memory and places in it."""

    def __init__(self, memory: torch.Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.memory, self.at + values_of(places))

    def to(self, element: torch.dtype, bitcast: bool = False) -> Pointer:
        assert bitcast
        return Pointer(self.memory.view(element), self.at)

    def load(self, mask: torch.Tensor | None = None, other: Any = 0) -> torch.Tensor:
        at = torch.as_tensor(self.at)
        if mask is None:
            return self.memory[at.long()]
        mask = mask.expand(at.shape)
        return torch.where(mask, self.memory[torch.where(mask, at, 0).long()], other).to(self.memory.dtype)

    def store(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        at = torch.as_tensor(self.at)
        x, mask = x.expand(at.shape), torch.ones_like(at, dtype=torch.bool) if mask is None else mask.expand(at.shape)
        self.memory[at[mask].long()] = x[mask].to(self.memory.dtype)


class Described:
    """A tensor that TMA copies boxes of."""

    layout = None

    def __init__(self, descriptor: TensorDescriptor) -> None:
        self._memory, self._box_shape = descriptor.base, descriptor.block_shape

    def box(self, at: list[Any]) -> torch.Tensor:
        """Zeros where it reaches beyond the tensor."""
        box = torch.zeros(self._box_shape, dtype=self._memory.dtype)
        inside = self._inside(at)
        box[tuple(map(slice, inside.shape))] = inside
        return box

    def store(self, at: list[Any], box: torch.Tensor) -> None:
        """What reaches beyond the tensor is left out."""
        inside = self._inside(at)
        inside.copy_(box[tuple(map(slice, inside.shape))])

    def _inside(self, at: list[Any]) -> torch.Tensor:
        assert all(int(start) >= 0 for start in at)
        return self._memory[tuple(slice(int(x), int(x) + size) for x, size in zip(at, self._box_shape, strict=True))]


class Shared:
    """Shared memory of a program. Reinterpreted, its bytes are in the order of rows: swizzles of both forms agree."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.type = SimpleNamespace(shape=list(values.shape))

    def index(self, at: Any) -> Shared:
        return Shared(self.values[int(values_of(at))])

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.values.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))

    def load(self, layout: None = None) -> Tensor:
        return Tensor(self.values.clone())

    def store(self, x: Tensor) -> None:
        assert x.values.dtype == self.values.dtype
        self.put(x.values)

    def put(self, values: torch.Tensor) -> None:
        self.values.copy_(values)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: None) -> Shared:
        return Shared(self.values.view(-1).view(dtype).view(shape))


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    if not isinstance(condition, Tensor):
        condition = Tensor(torch.tensor(condition))
    found = torch.where(condition.values, values_of(a), values_of(b))
    is_of_numbers = not isinstance(a, Tensor) and not isinstance(b, Tensor)
    return Tensor(found.to(torch.int32) if is_of_numbers and found.dtype == torch.int64 else found)


def _maximum(a: Tensor, b: Any, propagate_nan: Any = None) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return Tensor(torch.maximum(a.values, b.values))
    return Tensor(torch.maximum(a.values, torch.as_tensor(values_of(b), dtype=a.dtype)))


def _minimum(a: Any, b: Any) -> Any:
    if not isinstance(a, Tensor):
        return _minimum(b, a) if isinstance(b, Tensor) else min(a, b)
    return Tensor(torch.minimum(a.values, torch.as_tensor(values_of(b), dtype=a.dtype)))


def _largest(x: Tensor, axis: int, combine: Any) -> Tensor:
    """The one reduction that is not a sum; as torch, it gives NaN where there is one."""
    assert combine.__name__ == "_larger"
    return Tensor(x.values.amax(axis))


def _load(at: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Tensor:
    return Tensor(at.load(None if mask is None else torch.as_tensor(values_of(mask)), 0 if other is None else other))


def _store(at: Pointer, x: Any, mask: Tensor | None = None) -> None:
    at.store(torch.as_tensor(values_of(x)), values_of(mask))


def _atomic_add(at: Pointer, number: int, sem: str, scope: str) -> int:
    """Of 0: what a program does again and again until others have come, which takes a while."""
    if number == 0:
        time.sleep(1e-3)
        program.polls = getattr(program, "polls", 0) + 1
        if program.polls > MOST_SECONDS * 1e3 or program.failures:
            raise TimeoutError("a number that a program waits for is never reached")
    with _atomic:
        before = int(at.load())
        at.store(torch.tensor(before + number))
    return before


def _atomic_exchange(at: Pointer, number: int, sem: str, scope: str) -> None:
    with _atomic:
        at.store(torch.tensor(number))


def _asm(text: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    """PTX is run, but for pieces of the chain that go to memory or whose values lie in several rows: these are done for
    whole tensors.
    """
    if pack > 2 and "prmt" in text:
        return _pick_bytes(*args)
    if "lop3.b32 $0, t, 0xf0f0f0f0, 0x80808080, 0x6a" in text:
        bytes_ = args[0].values.to(torch.int32)
        halves = ((bytes_ << 4 & 0xF0) ^ 0x80, (bytes_ & 0xF0) ^ 0x80)
        return tuple(Tensor(half.to(torch.int8)) for half in halves)
    if "st.relaxed.gpu.global.b16" in text:
        at, bits, mask = args
        at.to(torch.int16, bitcast=True).store(bits.values.to(torch.int16), mask.values != 0)
        return None
    if "ld.relaxed.gpu.global.v4.b16" in text:
        return _poll(args[:-1], args[-1], again="bra AGAIN" in text)
    found = run_elementwise(text, constraints, [x.values for x in args], dtype, pack)
    return tuple(map(Tensor, found)) if isinstance(found, tuple) else Tensor(found)


def _pick_bytes(x: Tensor, pick: Tensor) -> Tensor:
    """`prmt`: four values side by side along the inputs are a word; the first one's pick says which of them, or 0."""
    words = x.values.unflatten(-2, (-1, 4))
    picks = pick.values.unflatten(-2, (-1, 4))[..., 0, :]
    bytes_ = torch.cat([words, torch.zeros_like(words)], -2)
    chosen = [picks >> 4 * i & 7 for i in range(4)]
    found = torch.stack([bytes_.gather(-2, c.long().unsqueeze(-2)).squeeze(-2) for c in chosen], -2)
    return Tensor(found.flatten(-3, -2))


def _poll(pieces: Any, first_of_thread: Pointer, again: bool) -> tuple[Tensor, ...]:
    """Four values at a time, of which one or more are not written; their places are those of `chain_results`."""
    unit = torch.arange(32)
    found = [piece.values.clone() for piece in pieces]
    until = time.monotonic() + MOST_SECONDS
    while True:
        for i, x in enumerate(found):
            missing = (x == NOT_WRITTEN).unflatten(1, (-1, 4)).any(-1, keepdim=True).expand(-1, -1, 4).flatten(1)
            places = first_of_thread + (i * x.numel() + (unit & (1 | 2 | 16)))
            found[i] = torch.where(missing, places.load(missing), x)
        if not again or not any((x == NOT_WRITTEN).any() for x in found):
            return tuple(Tensor(x) for x in found)
        if time.monotonic() > until or program.failures:
            raise TimeoutError("a result that a program waits for is never written")
        time.sleep(1e-4)


def copy_async(to: Shared, at: Pointer, mask: Tensor) -> None:
    to.values.copy_(at.load(mask.values))  # zeros where it is masked, as cp.async has them


def _multiply(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return Tensor(c.values + (a.values.double() @ b.values.double()).to(torch.int32))


def _allocate(dtype: torch.dtype, shape: list[int], layout: Callable[[torch.Tensor], Any] | None) -> Any:
    """The layout of barriers says what is made of the memory."""
    return (layout or Shared)(torch.zeros(list(shape), dtype=dtype))


def _specialize(functions_and_args: list[Any], worker_warps: list[int], worker_registers: list[int]) -> None:
    own = dict(vars(program))

    def partition(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        vars(program).update(own)
        function(*args)

    _run_beside([partial(partition, *each) for each in functions_and_args], program.failures)


def _run_beside(works: list[Callable[[], None]], failures: list[BaseException]) -> None:
    """Each in a thread. Once one fails, others of the launch that wait for it fail too; the first failure is raised."""

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


LANGUAGE = SimpleNamespace(
    int8=torch.int8, int16=torch.int16, int32=torch.int32, int64=torch.int64, float32=torch.float32,
    bfloat16=torch.bfloat16, float16=torch.float16,
    pointer_type=lambda element: element,
    program_id=lambda axis: program.number,
    num_programs=lambda axis: program.count,
    num_warps=lambda: 4,
    static_range=range,
    thread_barrier=lambda: None,
    arange=lambda first, last, layout=None: Tensor(torch.arange(first, last, dtype=torch.int32)),
    full=lambda shape, value, dtype, layout=None: Tensor(torch.full(list(shape), values_of(value), dtype=dtype)),
    zeros=lambda shape, dtype, layout=None: Tensor(torch.zeros(list(shape), dtype=dtype)),
    zeros_like=lambda x: Tensor(torch.zeros_like(x.values)),
    where=_where,
    maximum=_maximum,
    minimum=_minimum,
    reduce=_largest,
    abs=lambda x: Tensor(x.values.abs()),
    exp=lambda x: Tensor(x.values.exp()),
    exp2=lambda x: Tensor(x.values.exp2()),
    max=lambda x, axis: Tensor(x.values.amax(axis)),
    rsqrt=lambda x: Tensor(x.values.rsqrt()),
    sum=lambda x, axis: Tensor(x.values.sum(axis)),
    reshape=lambda x, shape: x.reshape(shape),
    permute=lambda x, order: Tensor(x.values.permute(order)),
    expand_dims=lambda x, axis: Tensor(x.values.unsqueeze(axis)),
    broadcast=lambda a, b: tuple(Tensor(x) for x in torch.broadcast_tensors(a.values, b.values)),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    join=lambda a, b: Tensor(torch.stack([a.values, b.values], -1)),
    split=lambda x: (Tensor(x.values[..., 0]), Tensor(x.values[..., 1])),
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    atomic_xchg=_atomic_exchange,
    inline_asm_elementwise=_asm,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
    **{name: lambda *args, **named: None for name in dir(gluon_language) if name.endswith("Layout")},
)  # fmt: skip
_COPIES = SimpleNamespace(
    async_copy_global_to_shared=copy_async, commit_group=lambda: None, wait_group=lambda count: None
)
_NAMES: dict[str, Any] = {
    "gl": LANGUAGE, "tl": LANGUAGE, "async_copy": _COPIES, "mma_v2": _multiply,
    "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None,
}  # fmt: skip


class Interpreted:
    """Stands in for a kernel: a launch runs its source, one thread for each program.

    `names`: what names of its modules mean, where that is not what they mean in all kernels.
    """

    def __init__(self, kernel: Any, names: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._modules: dict[int, dict[str, Any]] = {}
        self._names = {**_NAMES, **names}
        self._run = self._in_torch(kernel.fn)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(
            *args: Any, num_warps: int, launch_pdl: bool = False, launch_cooperative_grid: bool = False,
            maxnreg: int | None = None, **constants: Any,
        ) -> None:  # fmt: skip
            made, fixed = [_argument(x) for x in args], {name: _argument(x) for name, x in constants.items()}
            failures: list[BaseException] = []

            def run(number: int) -> None:
                program.number, program.count, program.failures = number, grid[0], failures
                self._run(*made, **fixed)

            _run_beside([partial(run, number) for number in range(grid[0])], failures)

        return launch

    def _in_torch(self, function: FunctionType) -> FunctionType:
        return FunctionType(
            function.__code__, self._module_of(function), function.__name__, function.__defaults__, function.__closure__
        )

    def _module_of(self, function: FunctionType) -> dict[str, Any]:
        """What the function's module names, in torch; of functions that call each other there is one each."""
        names = function.__globals__
        if id(names) not in self._modules:
            own = self._modules[id(names)] = dict(names)
            for name, value in names.items():
                if isinstance(value, gluon_language.constexpr):
                    own[name] = value.value
                elif isinstance(value, JITFunction | ConstexprFunction):
                    own[name] = self._in_torch(value.fn)
            own |= {name: value for name, value in self._names.items() if name in names}
        return self._modules[id(names)]


def _argument(x: Any) -> Any:
    if isinstance(x, TensorDescriptor):
        return Described(x)
    if isinstance(x, gluon_language.dtype):
        return {"bf16": torch.bfloat16, "fp16": torch.float16}[x.name]
    if not isinstance(x, torch.Tensor):
        return x
    between_rows = x if x.is_contiguous() else x.as_strided((len(x), x.stride(0)), (x.stride(0), 1))
    return Pointer(between_rows.view(-1))
