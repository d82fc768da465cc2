"""What becomes of sums in the int4 kernel for Hopper (`hopper_int4`): whose they are, where they go, who adds them."""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

MOST_PARTS = 8  # pieces that a tile may fall into
_MOST_PARTS = gl.constexpr(MOST_PARTS)


@gluon.jit
def piece_start(program, programs, work):
    """Where the piece of a program begins; that of the next begins where it ends."""
    return program * work // programs


@gluon.jit
def program_of(item, programs, work):
    """Whose piece an item of the list is in."""
    return ((item + 1) * programs - 1) // work


@gluon.jit
def places_of(COUNT: gl.constexpr):
    """Where sums [64, COUNT rows] go in memory: warps write 128 bytes at a time, and 16 rows are one piece."""
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COUNT, 16])
    m = gl.arange(0, 64, gl.SliceLayout(1, sums))[:, None]
    n = gl.arange(0, COUNT, gl.SliceLayout(0, sums))[None, :]
    thread = m // 16 * 32 + m % 8 * 4 + n % 8 // 2
    return (n // 8 * 4 + m // 8 % 2 * 2 + n % 2) * 128 + thread


@gluon.jit
def store_tile(out, buffer, sums, BIAS, output, row, outputs, DTYPE: gl.constexpr):
    """A half at a time through shared memory; TMA leaves out what is beyond the last row or output."""
    ROWS: gl.constexpr = sums.type.shape[1]
    if BIAS is not None:
        m = output + gl.arange(0, 64, gl.SliceLayout(1, sums.type.layout))
        sums += gl.load(BIAS + m, mask=m < outputs, other=0.0).to(gl.float32)[:, None]
    halves = gl.split(gl.permute(gl.reshape(sums.to(DTYPE), [64, 2, ROWS // 2]), (0, 2, 1)))
    for half in gl.static_range(2):
        tma.store_wait(0)
        gl.thread_barrier()
        buffer.permute((1, 0)).store(halves[half])
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [row + half * (ROWS // 2), output], buffer)


@gluon.jit
def store_directly(OUT, sums, BIAS, output, row, rows, outputs, out_stride, DTYPE: gl.constexpr):
    """For few sums: no more than 16 bytes of a row are written together."""
    layout: gl.constexpr = sums.type.layout
    m = output + gl.arange(0, 64, gl.SliceLayout(1, layout))
    n = row + gl.arange(0, sums.type.shape[1], gl.SliceLayout(0, layout))
    if BIAS is not None:
        sums += gl.load(BIAS + m, mask=m < outputs, other=0.0).to(gl.float32)[:, None]
    to = OUT + n.to(gl.int64)[None, :] * out_stride + m[:, None]
    gl.store(to, sums.to(DTYPE), mask=(m < outputs)[:, None] & (n < rows)[None, :])


@gluon.jit
def add_part(
    OUT, SUMS, BIAS, flags, part, parts, first_slot, output, row, rows, outputs, out_stride, which: gl.constexpr,
    ROWS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Part `part` of `parts` of this warp group's half of a tile, once all programs have written theirs.

    What they found is in consecutive slots but for the first, which found it last and has it in its second slot.
    """
    COUNT: gl.constexpr = 16
    places = places_of(COUNT)
    while gl.atomic_add(flags, 0, sem="acquire", scope="gpu") < parts:
        pass
    for unit in range(part, 2 * ROWS // COUNT, parts):
        half = unit // (ROWS // COUNT)
        rows_before = unit % (ROWS // COUNT) * COUNT
        found = ()
        for p in gl.static_range(_MOST_PARTS):
            slot = first_slot if p == 0 else (first_slot // 2 + p) * 2
            at = ((slot * 2 + which) * 2 + half).to(gl.int64) * (64 * ROWS) + rows_before * 64
            found = found + (gl.load(SUMS + at + places, mask=p < parts, other=0.0, cache_modifier=".cg"),)  # noqa: RUF005
        total = found[0]
        for p in gl.static_range(1, _MOST_PARTS):
            total += found[p]
        store_directly(OUT, total, BIAS, output + half * 64, row + rows_before, rows, outputs, out_stride, DTYPE)
    # The last to come leaves the flag as it was found.
    gl.thread_barrier()
    if gl.atomic_add(flags, 1, sem="acq_rel", scope="gpu") == 2 * parts - 1:
        gl.atomic_xchg(flags, 0, sem="release", scope="gpu")
