"""Runs the inline PTX of kernels in torch: a register of 32 bits is an int32 tensor, one value for each thread."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

HALVES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def run_elementwise(text: str, constraints: str, args: list[torch.Tensor], dtypes: Any, pack: int) -> Any:
    """As `inline_asm_elementwise` does it: `pack` values side by side in their rows go through the text together."""
    made = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    per_result = [max(1, pack * dtype.itemsize // 4) for dtype in made]
    given = [register for x in args for register in _registers(x.contiguous(), pack)]
    assert len(constraints.split(",")) == sum(per_result) + len(given)
    registers = {f"${sum(per_result) + i}": x for i, x in enumerate(given)}
    tied = [int(c) for c in constraints.split(",") if c.isdigit()]
    registers |= {f"${i}": given[at] for at, i in enumerate(tied)}
    run_ptx(text, registers)
    results, at = [], 0
    for dtype, count in zip(made, per_result, strict=True):
        words = torch.stack([registers[f"${at + i}"] for i in range(count)], -1)
        results.append(words.contiguous().view(dtype).flatten(-2))
        at += count
    return tuple(results) if isinstance(dtypes, tuple) else results[0]


def _registers(x: torch.Tensor, pack: int) -> tuple[torch.Tensor, ...]:
    words = x.view(x.dtype if x.itemsize == 8 else torch.int32)
    return words.unflatten(-1, (-1, max(1, pack * x.itemsize // 4) if x.itemsize < 8 else 1)).unbind(-1)


def run_ptx(text: str, registers: dict[str, torch.Tensor]) -> None:
    """Statement by statement. Reading a register that was never written fails. A branch skips what lies in front of its
    label, thread by thread, and a vote has each thread's own predicate.
    """
    shape = next(iter(registers.values())).shape
    runs: torch.Tensor | None = None

    def value(name: str) -> torch.Tensor:
        if name in registers:
            return registers[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return torch.full(shape, _signed(number), dtype=torch.int32)

    for statement in text.strip()[1:-1].split(";"):
        name, _, rest = statement.strip().partition(" ")
        if not name or name == ".reg":
            continue
        if name.endswith(":"):
            runs = None
            continue
        if name.startswith("@!"):
            assert rest.startswith("bra ")
            runs = registers[name[2:]]
            continue
        to, *inputs = re.findall(r"\{.*\}|[^,\s]+", rest)
        if name == "mov.b64":
            low_and_high = value(inputs[0]).contiguous().view(torch.int32).unflatten(-1, (-1, 2))
            registers |= zip(re.findall(r"\w+", to), low_and_high.unbind(-1), strict=True)
        elif name in ("lop3.b32", "prmt.b32", "shl.b32", "shr.b32", "shr.u32"):
            *operands, last = inputs
            registers[to] = _WITH_NUMBER[name](*map(value, operands), int(last, 0))
        elif name == "vote.sync.any.pred":
            registers[to] = registers[inputs[0]]
        else:
            found = _plain(name)(*map(value, inputs))
            registers[to] = found if runs is None else torch.where(runs, found, registers[to])


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _plain(name: str) -> Callable[..., torch.Tensor]:
    operation, *_, kind = name.split(".")
    if kind in HALVES:
        return lambda *x: _in_halves(HALVES[kind], {"mul": torch.mul, "fma": _fma}[operation], *x)
    if kind == "f32":
        return _IN_FLOAT32[name]
    words = {"and.b32": torch.bitwise_and, "or.b32": torch.bitwise_or, "add.u32": torch.add}
    words["setp.ne.s32"] = torch.ne
    return {"mov.b32": lambda a: a, "selp.b32": lambda a, b, is_first: torch.where(is_first, a, b), **words}[name]


def _in_halves(dtype: torch.dtype, operation: Callable[..., torch.Tensor], *words: torch.Tensor) -> torch.Tensor:
    """In float64, and rounded once."""
    found: torch.Tensor = operation(*(x.contiguous().view(dtype).double() for x in words))
    return found.to(dtype).view(torch.int32)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a * b + c


def _float(word: torch.Tensor) -> torch.Tensor:
    return word.contiguous().view(torch.float32)


def _shift_right(a: torch.Tensor, by: int) -> torch.Tensor:
    return a >> by & 0xFFFFFFFF >> by if by else a


def _any_of_three(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    """`lop3`: bit 4 · a + 2 · b + c of the table is the result for these bits."""
    pairs = {0: ~a & ~b, 1: ~a & b, 2: a & ~b, 3: a & b}
    chosen = {0: torch.zeros_like(c), 1: ~c, 2: c, 3: torch.full_like(c, -1)}
    return reduce(torch.bitwise_or, (both & chosen[table >> 2 * i & 3] for i, both in pairs.items()))


def _pick_bytes(a: torch.Tensor, b: torch.Tensor, picks: int) -> torch.Tensor:
    """`prmt`: each hexadecimal digit names a byte, of `a` below 4 and of `b` from there on."""
    assert not picks & 0x8888, "signs of bytes are picked by no kernel"
    digits = [picks >> 4 * i & 7 for i in range(4)]
    bytes_ = [((b if digit > 3 else a) >> 8 * (digit % 4) & 0xFF) << 8 * i for i, digit in enumerate(digits)]
    return reduce(torch.bitwise_or, bytes_)


_IN_FLOAT32: dict[str, Callable[..., torch.Tensor]] = {
    "mul.f32": lambda a, b: (_float(a) * _float(b)).view(torch.int32),
    "setp.neu.f32": lambda a, b: _float(a) != _float(b),
    "setp.neu.or.f32": lambda a, b, before: (_float(a) != _float(b)) | before,
}
_WITH_NUMBER: dict[str, Callable[..., torch.Tensor]] = {
    "lop3.b32": _any_of_three,
    "prmt.b32": _pick_bytes,
    "shl.b32": lambda a, by: a << by,
    "shr.b32": _shift_right,
    "shr.u32": _shift_right,
}
