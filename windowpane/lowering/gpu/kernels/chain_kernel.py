"""All int4 products between two layers' attention for one row, in one launch (Gluon).

From what was attended to the next layer's queries, keys and values there are four products with norms between them.
One after the other as launches, each would begin with empty hands: weights take longest to come when nobody has asked
for them yet. Here programs ask for the next product's weights while the one before ends, as these depend on nothing.
Between products a program waits for what it needs of the others.

    attended → out → + norms → gate, up → activated → down → + norms → q, k, v of the next layer

There is a program for each multiprocessor, and it has whole outputs of every product to itself: no sum is shared
between programs, and none depends on timing. Weights come in portions of 128 rows by 256 inputs through a ring in
shared memory, three portions at a turn. Of a *tall* portion the rows are outputs, 16 to each of 8 warps; a *gated* one
has 64 of the gate and the same 64 of what it gates. Of a *long* one there are 16 outputs, and each warp has inputs of
its own; their sums meet at the end.

Reading is what takes time, but only as long as a weight costs little more than an instruction. Tensor cores for bytes
need two for eight weights: a mask leaves four of them. Activations become two digits of seven bits, with a power of two
for each group of 32 inputs, which is exact but for the smallest (`chain_inputs.digits_of`). Tensor cores have 8 columns
for rows of activations, and here is one row: each column has one digit of one of a block's four groups, so that a
block's sums meet their scales once. Sums start as a float32 whose lowest bits they are.

Programs wait for each other's results by polling the slots they are written to (`chain_results`). There are two sets of
slots: each launch uses one and clears the other for the launch after it. Each program keeps its own note of which one,
and the residual stream is read from one place and written to another: within a launch no program writes what another
reads, but for the slots. All programs must run at once; that the card can hold them is tried at start-up, by a
cooperative launch (`chain.try_chain`). Launches that overlap keep it so: a dependent one starts only once every program
here runs. A *turn* is a step of the loop over portions.
"""

# mypy: disable-error-code="assignment,misc,no-redef,var-annotated"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windowpane.lowering.gpu.kernels.chain_forms import ARE_AWAITED, ARE_THERE, IS_GATED, IS_LONG, PIECE, PORTIONS
from windowpane.lowering.gpu.kernels.chain_inputs import hold_pieces, load_pieces, piece_layout, pieces_of, store_pieces
from windowpane.lowering.gpu.kernels.chain_portions import (
    ends_within_a_turn,
    fetch,
    groups_of,
    prepare,
    product,
    shape_of,
    turns_of,
)
from windowpane.lowering.gpu.kernels.chain_results import forget, leave, take
from windowpane.lowering.gpu.kernels.gated import gate_times_up


@gluon.jit
def _residual_norm(FROM, hidden, post_weight, scalar, weight, eps, WIDTH: gl.constexpr):
    """hidden + the result in FROM, normed where there is a weight for it, times the scalar; and the norm of that.

    Rounded like `norms.residual_norm`. All in pieces.
    """
    VALUES: gl.constexpr = PIECE * 32
    dtype: gl.constexpr = hidden[0].dtype
    result = take(FROM, WIDTH)
    x = ()
    squares = gl.zeros_like(hidden[0]).to(gl.float32)
    for i in gl.static_range(pieces_of(WIDTH)):
        wide = result[i].to(gl.float32)
        squares += wide * wide
        x = x + (wide,)  # noqa: RUF005
    scale = gl.rsqrt(gl.sum(gl.reshape(squares, [VALUES]), 0) / WIDTH + eps)
    squares = gl.zeros_like(x[0])
    updated = ()
    for i in gl.static_range(pieces_of(WIDTH)):
        more = x[i]
        if post_weight is not None:
            more = (more * scale * post_weight[i]).to(dtype).to(gl.float32)
        new = (hidden[i].to(gl.float32) + more).to(dtype)
        if scalar is not None:
            new = (new.to(gl.float32) * scalar).to(dtype)
        wide = new.to(gl.float32)
        squares += wide * wide
        updated = updated + (new,)  # noqa: RUF005
    scale = gl.rsqrt(gl.sum(gl.reshape(squares, [VALUES]), 0) / WIDTH + eps)
    normed = ()
    for i in gl.static_range(pieces_of(WIDTH)):
        normed = normed + ((updated[i].to(gl.float32) * scale * weight[i]).to(dtype),)  # noqa: RUF005
    return updated, normed


@gluon.jit
def _store_long(OUT, sums, meeting, first, last):
    """Three parts, where warps' sums meet."""
    a, b, c = gl.sum(sums[0], 2), gl.sum(sums[1], 2), gl.sum(sums[2], 2)
    meeting.store(gl.join(gl.join(a, b), gl.join(c, c)))
    total = gl.sum(meeting.load(gl.BlockedLayout([8, 1, 1, 1], [1, 16, 2, 1], [1, 1, 1, 8], [3, 2, 1, 0])), 0)
    m = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(2, total.type.layout)))[:, None, None]
    even = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, total.type.layout)))[None, :, None]
    odd = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout)))[None, None, :]
    part = odd * 2 + even
    n = first + part * 16 + m
    leave(OUT + n, total, (n < last) & (part < PORTIONS))


@gluon.jit
def _store_tall(OUT, sums, first, last, PARTS: gl.constexpr):
    for part in gl.static_range(PARTS):
        total = gl.sum(sums[part], 1)
        n = first + part * 128 + gl.arange(0, 128, total.type.layout)
        leave(OUT + n, total, n < last)


@gluon.jit
def _store_gated(OUT, sums, first, last, GELU: gl.constexpr):
    for part in gl.static_range(PORTIONS):
        total = gl.reshape(gl.sum(sums[part], 1).to(gl.bfloat16), [8, 2, 8])
        gate, up = gl.split(gl.permute(total, (0, 2, 1)))
        warp = gl.arange(0, 8, gl.SliceLayout(1, gate.type.layout))[:, None]
        n = first + part * 64 + warp * 8 + gl.arange(0, 8, gl.SliceLayout(0, gate.type.layout))[None, :]
        leave(OUT + n, gate_times_up(gate, up, GELU), n < last)


@gluon.jit
def _multiply(
    OUT, asked, following, ring, inputs, source, meeting, first, before, turns, SHAPE: gl.constexpr,
    NEXT_SHAPE: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """A product of this program's outputs from `first` on, into OUT, where gated ones go once activated and joined."""
    FORM: gl.constexpr = SHAPE[1]
    PARTS: gl.constexpr = SHAPE[2]
    last = asked[6]
    for group in range(groups_of(SHAPE)):
        sums = product(asked, following, ring, inputs, source, before, group, turns, SHAPE, NEXT_SHAPE)
        if FORM == IS_LONG:
            _store_long(OUT, sums, meeting, first + group * (16 * PORTIONS), last)
        elif FORM == IS_GATED:
            _store_gated(OUT, sums, first + group * (64 * PORTIONS), last, GELU)
        else:
            OWN: gl.constexpr = 1 if PARTS == 1 else PORTIONS
            _store_tall(OUT, sums, first + group * (128 * PORTIONS), last, OWN)


@gluon.jit
def _share(outputs):
    """This program's outputs."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return program * outputs // programs, (program + 1) * outputs // programs


@gluon.jit
def _bits(X):
    return X.to(gl.pointer_type(gl.int16), bitcast=True)


@gluon.jit(do_not_specialize=["out_steps", "next_outputs"])
def chain_kernel(
    ATTENDED, HIDDEN, NEW_HIDDEN, RESULTS, NEXT, OUT_U, OUT_S, GATE_U, GATE_S, DOWN_U, DOWN_S, NEXT_U, NEXT_S,
    POST_WEIGHT, PRE_WEIGHT, POST_MLP_WEIGHT, NEXT_WEIGHT, SCALAR, SIDE, out_steps, next_outputs, eps,
    WIDTH: gl.constexpr, INNER_WIDTH: gl.constexpr, OUT_ENDS: gl.constexpr,
    PARTS: gl.constexpr, GATE_PARTS: gl.constexpr, NEXT_PARTS: gl.constexpr, NEXT_FORM: gl.constexpr,
    PIECES: gl.constexpr, STAGES: gl.constexpr, GELU: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """RESULTS [2, …] holds the products' result slots, this launch's and the other's: SIDE [programs] says which. NEXT
    becomes the next layer's projections, or without NEXT_U the last norm. What was attended comes in `out_steps` of
    256: layers that differ in this and in the next projections' outputs alone are one kernel, whose code is fetched
    once (unless what was attended is wider than all else, or ends within a turn in some of them).

    PARTS, GATE_PARTS and NEXT_PARTS are what a program has at most.
    """
    units = ()
    scales = ()
    for _ in gl.static_range(PORTIONS):
        own = gl.allocate_shared_memory(gl.int16, [STAGES, 128, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
        units = units + (own,)  # noqa: RUF005
        own = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        scales = scales + (own,)  # noqa: RUF005
    ring = (units, scales)
    inputs = (
        gl.allocate_shared_memory(gl.int8, [PIECES, 2 * PIECE, 32], gl.SwizzledSharedLayout(16, 4, 2, [1, 0])),
        gl.allocate_shared_memory(gl.float32, [PIECES, 2 * PIECE], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    meeting = gl.allocate_shared_memory(gl.float32, [8, 16, 2, 2], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    WIDTH_PIECES: gl.constexpr = pieces_of(WIDTH)
    middle = gl.allocate_shared_memory(  # the residual stream between attention and MLP
        HIDDEN.dtype.element_ty, [WIDTH_PIECES, PIECE, 32], gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    )
    OUT_SHAPE: gl.constexpr = shape_of(IS_LONG, PARTS, OUT_ENDS, ARE_THERE)
    GATE_SHAPE: gl.constexpr = shape_of(IS_GATED, GATE_PARTS, ends_within_a_turn(WIDTH, IS_GATED, GATE_PARTS))
    DOWN_SHAPE: gl.constexpr = shape_of(IS_LONG, PARTS, ends_within_a_turn(INNER_WIDTH, IS_LONG, PARTS), ARE_AWAITED)
    NEXT_SHAPE: gl.constexpr = shape_of(NEXT_FORM, NEXT_PARTS, ends_within_a_turn(WIDTH, NEXT_FORM, NEXT_PARTS))
    GATE_TURNS: gl.constexpr = turns_of(WIDTH, IS_GATED, GATE_PARTS)
    DOWN_TURNS: gl.constexpr = turns_of(INNER_WIDTH, IS_LONG, PARTS)
    NEXT_TURNS: gl.constexpr = turns_of(WIDTH, NEXT_FORM, NEXT_PARTS)
    WIDTH_STEPS: gl.constexpr = WIDTH // 256
    INNER_STEPS: gl.constexpr = INNER_WIDTH // 256
    out_turns = (out_steps + 7) // 8 * (PARTS // PORTIONS)
    first, last = _share(WIDTH)
    inner_first, inner_last = _share(INNER_WIDTH)
    next_first, next_last = _share(next_outputs)
    if PDL:
        gdc_launch_dependents()
    out = prepare(OUT_U, OUT_S, first, last, out_steps, OUT_SHAPE, 0)
    for turn in gl.static_range(STAGES):
        fetch(out, ring, turn, turn, OUT_SHAPE)
        async_copy.commit_group()
    gate = prepare(GATE_U, GATE_S, inner_first, inner_last, WIDTH_STEPS, GATE_SHAPE, INNER_WIDTH)
    if PDL:
        gdc_wait()
    side = gl.load(SIDE + gl.program_id(0), volatile=True)
    EACH: gl.constexpr = 2 * WIDTH + INNER_WIDTH
    OUT = RESULTS + side * EACH
    INNER = OUT + WIDTH
    DOWN = INNER + INNER_WIDTH
    attended = (_bits(ATTENDED), out_steps * 256)
    _multiply(OUT, out, gate, ring, inputs, attended, meeting, first, 0, out_turns, OUT_SHAPE, GATE_SHAPE, GELU)

    down = prepare(DOWN_U, DOWN_S, first, last, INNER_STEPS, DOWN_SHAPE, 0)
    # What does not depend on others is loaded before they are waited for.
    hidden = load_pieces(HIDDEN, WIDTH, False)
    post_weight = POST_WEIGHT
    if POST_WEIGHT is not None:
        post_weight = load_pieces(POST_WEIGHT, WIDTH, True)
    weight = load_pieces(PRE_WEIGHT, WIDTH, True)
    other = _bits(RESULTS) + (1 - side) * EACH
    forget(other, first, last)
    forget(other + WIDTH, inner_first, inner_last)
    forget(other + (WIDTH + INNER_WIDTH), first, last)
    hidden, normed = _residual_norm(_bits(OUT), hidden, post_weight, None, weight, eps, WIDTH)
    hold_pieces(normed, inputs, WIDTH)
    for i in gl.static_range(WIDTH_PIECES):
        middle.index(i).store(hidden[i])
    _multiply(
        INNER, gate, down, ring, inputs, None, meeting, inner_first, out_turns, GATE_TURNS, GATE_SHAPE, DOWN_SHAPE, GELU
    )

    following = down  # the last layer has no successor: `down` is passed again, and its portions are never fetched
    if NEXT_PARTS > 0:
        following = prepare(NEXT_U, NEXT_S, next_first, next_last, WIDTH_STEPS, NEXT_SHAPE, 0)
    before = out_turns + GATE_TURNS
    inner = (_bits(INNER), INNER_WIDTH)
    _multiply(
        DOWN, down, following, ring, inputs, inner, meeting, first, before, DOWN_TURNS, DOWN_SHAPE, NEXT_SHAPE, GELU
    )

    post_weight = POST_MLP_WEIGHT
    if POST_MLP_WEIGHT is not None:
        post_weight = load_pieces(POST_MLP_WEIGHT, WIDTH, True)
    weight = load_pieces(NEXT_WEIGHT, WIDTH, True)
    scalar = SCALAR
    if SCALAR is not None:
        scalar = gl.load(SCALAR, eviction_policy="evict_last").to(gl.float32)
    layout: gl.constexpr = piece_layout()
    hidden = ()
    for i in gl.static_range(WIDTH_PIECES):
        hidden = hidden + (middle.index(i).load(layout),)  # noqa: RUF005
    hidden, normed = _residual_norm(_bits(DOWN), hidden, post_weight, scalar, weight, eps, WIDTH)
    gl.store(SIDE + gl.program_id(0), 1 - side)
    if gl.program_id(0) == 0:
        store_pieces(NEW_HIDDEN, hidden, WIDTH)
    if NEXT_PARTS == 0:
        if gl.program_id(0) == 0:
            store_pieces(NEXT, normed, WIDTH)
    else:
        hold_pieces(normed, inputs, WIDTH)
        NOTHING: gl.constexpr = shape_of(NEXT_FORM, 0, False)
        before += DOWN_TURNS
        _multiply(
            NEXT, following, following, ring, inputs, None, meeting, next_first, before, NEXT_TURNS, NEXT_SHAPE,
            NOTHING, GELU,
        )  # fmt: skip
    async_copy.wait_group(0)
