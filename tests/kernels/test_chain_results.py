"""How a program finds out that what others leave for it is there: the instructions it does so with, one by one.

Needs no GPU. That what programs leave is always seen is checked on one (`python3 -m bench.gpu_check "layer chain"`).
"""

from __future__ import annotations

import operator
import re

from hypothesis import given
from hypothesis import strategies as st

from windowpane.lowering.gpu.kernels import chain_results

ALL_ONES = 0xFFFF
NUMBERS = st.sampled_from([0, 1, 0x7FFF, 0x8000, 0xFFFE]) | st.integers(0, ALL_ONES - 1)
PLAIN = {"mov.b32": lambda a: a, "add.u32": operator.add, "or.b32": operator.or_, "setp.ne.u32": operator.ne}


def words(halves: st.SearchStrategy[int], count: int) -> st.SearchStrategy[list[int]]:
    word = st.tuples(halves, halves).map(lambda found: found[0] | found[1] << 16)
    return st.lists(word, min_size=count, max_size=count)


@given(st.integers(1, 4), st.data())
def test_whatever_is_missing_is_loaded_until_it_is_there_and_nothing_else(pieces, data):
    """The PTX itself, for one thread. Two words side by side are loaded at a time, some in vain at first."""
    pairs = 2 * pieces
    there = data.draw(words(NUMBERS, 2 * pairs))
    found = data.draw(words(NUMBERS | st.just(ALL_ONES), 2 * pairs))
    in_vain = data.draw(st.lists(st.integers(0, 3), min_size=pairs, max_size=pairs))
    asked = {i // 2 for i, word in enumerate(found) if is_missing(word)}
    loads = [0] * pairs

    def load(pair):
        loads[pair] += 1
        a, b = there[2 * pair : 2 * pair + 2]
        return (a, b) if loads[pair] > in_vain[pair] else (a, b | ALL_ONES)

    result = run_ptx(chain_results._looking.fn(pieces, True), found, load)
    assert result == [there[i] if i // 2 in asked else word for i, word in enumerate(found)]
    assert loads == [in_vain[pair] + 1 if pair in asked else 0 for pair in range(pairs)]


@given(st.integers(1, 4), st.data())
def test_a_glance_loads_what_is_missing_once(pieces, data):
    found = data.draw(words(NUMBERS | st.just(ALL_ONES), 4 * pieces))
    memory = data.draw(words(NUMBERS | st.just(ALL_ONES), 4 * pieces))
    result = run_ptx(chain_results._looking.fn(pieces, False), found, lambda pair: memory[2 * pair : 2 * pair + 2])
    asked = {i // 2 for i, word in enumerate(found) if is_missing(word)}
    assert result == [memory[i] if i // 2 in asked else word for i, word in enumerate(found)]


def is_missing(word: int) -> bool:
    return ALL_ONES in (word & 0xFFFF, word >> 16)


def run_ptx(text: str, found: list[int], load) -> list[int]:
    """What a thread makes of the words it `found`. `load(i)`: what memory has for words 2 · i and 2 · i + 1."""
    lines = [line.rstrip(";") for line in text.split("\n")]
    registers = {f"${len(found) + i}": word for i, word in enumerate(found)}
    value = lambda x: registers[x] if x in registers else int(x, 0)  # noqa: E731
    at = 0
    while at < len(lines):
        guard, line = re.fullmatch(r"(@p )?(.*)", lines[at]).groups()
        at += 1
        if line in "{}" or line.startswith(".reg") or line.endswith(":") or (guard and not registers["p"]):
            continue
        name, rest = line.split(" ", 1)
        operands = re.findall(r"[\w$]+", rest)
        inputs = [value(x) for x in operands[1:]] if name not in ("bra", "ld.relaxed.gpu.global.v4.b16") else []
        if name == "bra":
            at = lines.index(f"{operands[0]}:")
        elif name.startswith("ld"):
            *halves, base, offset = operands
            assert base == f"${2 * len(found)}"
            piece, second = divmod(int(offset), 4096)
            assert second in (0, 32)
            loaded = load(2 * piece + second // 32)
            registers |= zip(halves, (half for word in loaded for half in (word & 0xFFFF, word >> 16)), strict=True)
        elif "{" in rest:
            registers[operands[0]] = inputs[0] | inputs[1] << 16
        elif name == "lop3.b32":
            assert inputs[3] == 0x08, "not the first, but both others"
            registers[operands[0]] = ~inputs[0] & inputs[1] & inputs[2]
        else:
            registers[operands[0]] = PLAIN[name](*inputs) & 0xFFFFFFFF
    return [registers[f"${i}"] for i in range(len(found))]
