"""Bringing tiles of 64 tokens from pages into shared memory by TMA: shared by the Gluon kernels.

A tile lies in shared memory as columns of 128 bytes, each 64 tokens high (what a 128-byte swizzle asks for). A page
holds BLOCK_TOKENS rows of a head, so each page fills a part of every column: one TMA box per page and column, 32 for a
tile of 512 dims and pages of 16 tokens. One warp cannot start that many fast enough: four bring a quarter each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def load_entry(table, tile, ok, which: gl.constexpr, BLOCK_TOKENS: gl.constexpr):
    """The page table entry that producer `which` needs for a tile."""
    PAGES: gl.constexpr = 64 // BLOCK_TOKENS
    return gl.load(table + tile * PAGES + which * PAGES // 4, mask=ok, other=0)


@gluon.jit
def copy_from_page(arena, entry, units_per_row, row, bar, tiles, buf, which: gl.constexpr, BLOCK_TOKENS: gl.constexpr):
    """Start producer `which`'s quarter of a tile: one page if it has 16 tokens, some columns of a larger one.

    `arena` is a descriptor over rows of `units_per_row` x 256 bytes; `row` is counted within a page.
    """
    PAGES: gl.constexpr = 64 // BLOCK_TOKENS
    BITS: gl.constexpr = tiles.dtype.primitive_bitwidth
    COLUMN: gl.constexpr = 128 * 8 // BITS
    COLUMNS: gl.constexpr = tiles.type.shape[2] // COLUMN
    BUFS: gl.constexpr = tiles.type.shape[0]
    PAGE: gl.constexpr = which * PAGES // 4
    OWN_COLUMNS: gl.constexpr = COLUMNS * PAGES // 4
    FIRST: gl.constexpr = which % (4 // PAGES) * OWN_COLUMNS
    boxes = tiles._reinterpret(
        tiles.dtype, [BUFS * COLUMNS * PAGES, BLOCK_TOKENS, COLUMN], gl.NVMMASharedLayout(128, BITS, rank=2)
    )
    mbarrier.expect(bar, 64 * COLUMNS * 128 // 4)
    for c in gl.static_range(OWN_COLUMNS):
        box = boxes.index((buf * COLUMNS + FIRST + c) * PAGES + PAGE)
        tma.async_copy_global_to_shared(arena, [entry // units_per_row + row, (FIRST + c) * COLUMN], bar, box)


@gluon.jit
def copy_columns(source, row, column, bar, tiles, buf, which: gl.constexpr):
    """Start producer `which`'s quarter of a tile of 64 consecutive rows: a quarter of the columns, from `column` on."""
    WIDTH: gl.constexpr = tiles.type.shape[2] // 4
    BUFS: gl.constexpr = tiles.type.shape[0]
    parts = tiles._reinterpret(gl.bfloat16, [BUFS * 4, 64, WIDTH], gl.NVMMASharedLayout(128, 16, rank=2))
    mbarrier.expect(bar, 64 * WIDTH * 2)
    tma.async_copy_global_to_shared(source, [row, column + which * WIDTH], bar, parts.index(buf * 4 + which))


@gluon.jit
def copy_tile(
    arena,
    tail,
    present,
    entry,
    units_per_row,
    slice_row,
    tail_row,
    head,
    j,
    past,
    bar,
    tiles,
    buf,
    which: gl.constexpr,
    BLOCK_TOKENS: gl.constexpr,
):
    """Tile j of a chunk's keys: from pages, from the zero-padded last part of the past, or from the activations."""
    DIM: gl.constexpr = tiles.type.shape[2]
    n_past = (past + 63) // 64
    if j < past // 64:
        copy_from_page(
            arena, entry, units_per_row, slice_row + head * BLOCK_TOKENS, bar, tiles, buf, which, BLOCK_TOKENS
        )
    elif j < n_past:
        copy_columns(tail, tail_row + head * 64, 0, bar, tiles, buf, which)
    else:
        copy_columns(present, (j - n_past) * 64, head * DIM, bar, tiles, buf, which)
