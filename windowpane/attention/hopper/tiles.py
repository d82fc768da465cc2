"""Bringing tiles of keys from pages into shared memory by TMA: shared by the Gluon kernels.

A tile lies in shared memory as columns of 128 bytes, each as high as the tile has tokens (what a 128-byte swizzle asks
for). A page holds BLOCK_TOKENS rows of a head, so each page fills a part of every column: one TMA box per page and
column, 32 for 64 tokens of 512 dims in pages of 16 tokens. One warp cannot start that many fast enough: for 512 dims
four bring a quarter each.

Tile j has the tokens from position j * TILE on. It comes from pages where all of it is past and held, from the
activations where all of it is present, and otherwise from a copy that `prepare.copy_edges` has made.

A launch has the segments that its members name. Rows of other segments lie behind a segment's own: TMA may read their
queries, whose results go nowhere, and writes whole tiles of rows only.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from windowpane.kv import hopper_scratch
from windowpane.schedule.step import Segment

EDGES = gl.constexpr(hopper_scratch.EDGES)
FIELDS = gl.constexpr(len(Segment._fields))


@gluon.jit
def tile_of(TILES, index):
    """Which segment of the launch, and which tile of its queries."""
    return gl.load(TILES + index * 2), gl.load(TILES + index * 2 + 1)


@gluon.jit
def segment_of(SEGMENTS, MEMBERS, member):
    """The fields of a launch's segment, and the first of its rows among rotated keys."""
    at = SEGMENTS + gl.load(MEMBERS + member * 2) * FIELDS
    slot, start, stop = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    row, q_row, q_count = gl.load(at + 3), gl.load(at + 4), gl.load(at + 5)
    return slot, start, stop, row, q_row, q_count, gl.load(MEMBERS + member * 2 + 1)


@gluon.jit
def store_rows(
    OUT, STRIDE: gl.constexpr, x, first_row, first_head, first_dim, tokens, GROUP: gl.constexpr, DIM: gl.constexpr
):
    """The rows of x, GROUP heads of each token, that belong to the first so many tokens."""
    row = gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
    dim = first_dim + gl.arange(0, x.type.shape[1], gl.SliceLayout(0, x.type.layout))
    at = (first_row + row // GROUP).to(gl.int64) * STRIDE + (first_head + row % GROUP) * DIM
    gl.store(OUT + at[:, None] + dim[None, :], x, mask=(row // GROUP < tokens)[:, None])


@gluon.jit
def load_entry(table, block, ok, columns, STRIPES: gl.constexpr):
    """The page of a block; `columns` is the table's width, whether or not it is a ring."""
    return gl.load(table + block % columns * STRIPES, mask=ok, other=0)


@gluon.jit
def load_entries(table, tile, ok, columns, PAGES: gl.constexpr, STRIPES: gl.constexpr):
    """The pages of a tile."""
    entries = ()
    for page in gl.static_range(PAGES):
        # Gluon adds tuples, it does not unpack them
        entries = entries + (load_entry(table, tile * PAGES + page, ok, columns, STRIPES),)  # noqa: RUF005
    return entries


@gluon.jit
def copy_from_page(arena, entry, units_per_row, row, bar, tiles, buf, which: gl.constexpr, BLOCK_TOKENS: gl.constexpr):
    """Start producer `which`'s quarter of a tile: one page if it has 16 tokens, some columns of a larger one.

    `arena` is a descriptor over rows of `units_per_row` x 256 bytes; `row` is counted from the page's start.
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
def copy_quarter(source, row, column, bar, tiles, buf, which: gl.constexpr):
    """Start producer `which`'s quarter of a tile of consecutive rows: a quarter of the columns, from `column` on."""
    TILE: gl.constexpr = tiles.type.shape[1]
    WIDTH: gl.constexpr = tiles.type.shape[2] // 4
    BUFS: gl.constexpr = tiles.type.shape[0]
    parts = tiles._reinterpret(gl.bfloat16, [BUFS * 4, TILE, WIDTH], gl.NVMMASharedLayout(128, 16, rank=2))
    mbarrier.expect(bar, TILE * WIDTH * 2)
    tma.async_copy_global_to_shared(source, [row, column + which * WIDTH], bar, parts.index(buf * 4 + which))


@gluon.jit
def copy_from_pages(arena, entries, row, bar, tiles, buf, BLOCK_TOKENS: gl.constexpr):
    """Start a whole tile of bf16 rows."""
    TILE: gl.constexpr = tiles.type.shape[1]
    DIM: gl.constexpr = tiles.type.shape[2]
    PAGES: gl.constexpr = TILE // BLOCK_TOKENS
    COLUMNS: gl.constexpr = DIM // 64
    BUFS: gl.constexpr = tiles.type.shape[0]
    boxes = tiles._reinterpret(
        gl.bfloat16, [BUFS * COLUMNS * PAGES, BLOCK_TOKENS, 64], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    for page in gl.static_range(PAGES):
        for c in gl.static_range(COLUMNS):
            box = boxes.index((buf * COLUMNS + c) * PAGES + page)
            # a table entry counts 256 bytes, a row of the arena descriptor is DIM x 2 bytes
            first = entries[page] * 2 if DIM == 64 else entries[page] // (DIM // 128)
            tma.async_copy_global_to_shared(arena, [first + row, c * 64], bar, box)
