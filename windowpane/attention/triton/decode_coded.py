"""Decode attention over coded pages, item by item: what `decode` does for plain rows, with codes and scales.

Numbers are attended as codes; scales multiply scores and probabilities. A score takes the logarithm of its token's V
scale into the exponent, so that probabilities times scales stay at most 1 and fit 16 bits at any length; the norm takes
it out again. Tokens are the rows of both products and query heads the columns.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import triton
import triton.language as tl

from windowpane.attention.triton.codes import dims_of, for_raw, halves_difference, halves_sum, plane, scales_of
from windowpane.attention.triton.decode_several import (
    PRESENT,
    Q_STRIDE,
    V_STRIDE,
    asks,
    first_seen,
    leave_rows,
    places,
    present_rows,
    present_scores,
    seen_present,
)
from windowpane.attention.triton.view import add_scores, column_of, rotate, section, soft_capped, weighted, with_sinks

UNIT = tl.constexpr(128)  # words, and half as many scales, in a unit of page offsets
MOST_WORDS = tl.constexpr(128)  # of a row at a time: operands are registers


@triton.jit
def coded_pair_item(
    Q, ARENA, table, PART, LSE, slot, head, lo, hi, first, past, base, q_row, columns, k_offset, v_offset, k_scales,
    v_scales, k_layer_scale, v_layer_scale, scale_log2, whole, K_PRESENT, V_PRESENT, OUT, SINKS, ends, several,
    D: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr, STRIPES: tl.constexpr,
    RING: tl.constexpr, CODE: tl.constexpr, PER_ROW: tl.constexpr, OPERAND: tl.constexpr, GROUP_ROWS: tl.constexpr,
    CAP: tl.constexpr, ROWS: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = 4 if CODE == 4 else 2
    W: tl.constexpr = D // PLANES
    C: tl.constexpr = W if W < MOST_WORDS else MOST_WORDS  # words at a time
    # Where the third and fourth of four pieces begin: planes 2 and 3, or the rest of planes 0 and 1.
    THIRD: tl.constexpr = 2 * W if PLANES == 4 else C
    FOUR: tl.constexpr = PLANES == 4 or W > C
    g = tl.arange(0, GROUP_ROWS)
    n = tl.arange(0, N)
    d = tl.arange(0, C)
    q_rows = Q + q_row + places(g, several, Q_STRIDE, D, G, ROWS)[:, None]
    q = q_rows + d[None, :]
    g_ok = asks(g, several, G, ROWS)[:, None]
    q0, start0 = for_raw(_operand(tl.load(q, mask=g_ok, other=0.0), OPERAND), 0, CODE, OPERAND)
    q1, start1 = for_raw(_operand(tl.load(q + W, mask=g_ok, other=0.0), OPERAND), 1, CODE, OPERAND)
    q_sum = tl.zeros([GROUP_ROWS], tl.float32)
    if FOUR:
        SECOND: tl.constexpr = 2 if PLANES == 4 else 0
        q2, start2 = for_raw(_operand(tl.load(q + THIRD, mask=g_ok, other=0.0), OPERAND), SECOND, CODE, OPERAND)
        q3, start3 = for_raw(_operand(tl.load(q + THIRD + W, mask=g_ok, other=0.0), OPERAND), SECOND + 1, CODE, OPERAND)
        start0 += start2
        start1 += start3
    if CODE == 4:
        all_dims = tl.arange(0, D)[None, :]
        q_sum = tl.sum(tl.load(q_rows + all_dims, mask=g_ok, other=0.0).to(tl.float32), 1)
    sums = (tl.zeros([C, GROUP_ROWS], tl.float32),) * 4
    K = section(ARENA, k_offset, tl.int16)
    V = section(ARENA, v_offset, tl.int16)
    KS = section(ARENA, k_scales, tl.int32)
    VS = section(ARENA, v_scales, tl.int32)
    m = tl.full([GROUP_ROWS], -1e30, tl.float32)
    norm = tl.zeros([N, GROUP_ROWS], tl.float32)  # summed over tokens at the end
    on_base = tl.zeros([N, GROUP_ROWS], tl.float32)  # what all dims of V share: bases times probabilities
    # A tile that lies in one page has it looked up once, a tile ahead.
    ONE_PAGE: tl.constexpr = P % N == 0
    if ONE_PAGE:
        lo = tl.maximum(lo, first // N * N)
        next_page = _page_of(_first_read(lo, hi, first, ROWS), table, base, columns, P, STRIPES, RING)
    for i in range(lo, hi, N):
        t = i + n
        ok = (t >= first) & (t < past)
        if ONE_PAGE:
            page = next_page.to(tl.int64)
            next_page = _page_of(tl.minimum(i + N, hi - 1), table, base, columns, P, STRIPES, RING)
            row = head * P + i % P
            words = page * UNIT + row * ROW
            k_scale, k_base = scales_of(KS + (page * (UNIT // 2) + row), n, ok, k_layer_scale, CODE, PER_ROW)
            v_scale, v_base = scales_of(VS + (page * (UNIT // 2) + row), n, ok, v_layer_scale, CODE, PER_ROW)
            # Rows that no token fills may be anything, and any code is a number: it counts for nothing.
            k = K + words + (n * ROW)[:, None] + d[None, :]
            v = V + words + (n * ROW)[None, :] + d[:, None]
        else:
            page = tl.load(table + column_of(t, base, columns, P, RING) * STRIPES, mask=ok, other=0).to(tl.int64)
            row = head * P + t % P
            k_scale, k_base = scales_of(KS, page * (UNIT // 2) + row, ok, k_layer_scale, CODE, PER_ROW)
            v_scale, v_base = scales_of(VS, page * (UNIT // 2) + row, ok, v_layer_scale, CODE, PER_ROW)
            words = page * UNIT + row * ROW
            k = K + words[:, None] + d[None, :]
            v = V + words[None, :] + d[:, None]
        x = tl.load(k)
        # Two sums, since each product waits for the one before it.
        s0 = tl.broadcast_to(start0[None, :], [N, GROUP_ROWS])
        s1 = tl.broadcast_to(start1[None, :], [N, GROUP_ROWS])
        s0 = add_scores(plane(x, 0, CODE, OPERAND, True), q0, s0)
        s1 = add_scores(plane(x, 1, CODE, OPERAND, True), q1, s1)
        if PLANES == 4:
            s0 = add_scores(plane(x, 2, CODE, OPERAND, True), q2, s0)
            s1 = add_scores(plane(x, 3, CODE, OPERAND, True), q3, s1)
        elif FOUR:
            x = tl.load(k + C)
            s0 = add_scores(plane(x, 0, CODE, OPERAND, True), q2, s0)
            s1 = add_scores(plane(x, 1, CODE, OPERAND, True), q3, s1)
        s = soft_capped(_scores(s0 + s1, k_scale, k_base, q_sum, scale_log2, CODE), CAP)
        seen = ok[:, None]
        if ROWS > 1:
            seen &= t[:, None] >= first_seen(g, several, G, CHUNKED)[None, :]
        p, alpha, m, norm, on_base = _probabilities(s, v_scale, v_base, seen, m, norm, on_base, CODE, OPERAND)
        sums = _add_values(v, p, alpha, sums, W, C, CODE, OPERAND)
    if ROWS > 1:
        _end_rows(
            Q + q_row, K_PRESENT, V_PRESENT, OUT, PART, LSE, SINKS, slot, head, past, m, norm, on_base, sums,
            scale_log2, whole, ends, several, W, THIRD, FOUR, OPERAND, G, D, CAP, ROWS, CHUNKED,
        )  # fmt: skip
    else:
        _end(
            Q + q_row, K_PRESENT, V_PRESENT, OUT, PART, LSE, SINKS, slot, head, m, norm, on_base, sums, scale_log2,
            whole, W, THIRD, FOUR, OPERAND, G, D, CAP,
        )  # fmt: skip


@triton.jit
def coded_latent_item(
    Q, ARENA, table, COS, SIN, W_NORM, PART, LSE, slot, head, lo, hi, first, past, base, q_row, columns, n_offset,
    n_scales, layer_scale, scale_log2, whole, K_PRESENT, V_PRESENT, OUT, SINKS, ends, several, D: tl.constexpr,
    R: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr, STRIPES: tl.constexpr,
    RING: tl.constexpr, CODE: tl.constexpr, PER_ROW: tl.constexpr, OPERAND: tl.constexpr, GROUP_ROWS: tl.constexpr,
    CAP: tl.constexpr, ROWS: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """K = rotate(n * w) and V = n. Rotary dims are decoded, weighted and rotated; w of the others is folded into q.

    As in `_latent_item`, q rotates from tile to tile. Words are read once for K, in pieces that keep rotary dims apart
    wherever planes allow it, and once for V.
    """
    PLANES: tl.constexpr = 4 if CODE == 4 else 2
    W: tl.constexpr = D // PLANES
    C: tl.constexpr = W if W < MOST_WORDS else MOST_WORDS
    THIRD: tl.constexpr = 2 * W if PLANES == 4 else C
    FOUR: tl.constexpr = PLANES == 4 or W > C
    APART: tl.constexpr = W >= 2 * R  # all rotary dims are in plane 0
    ONE_PAGE: tl.constexpr = P % N == 0
    if ONE_PAGE:
        lo = tl.maximum(lo, first // N * N)
    g = tl.arange(0, GROUP_ROWS)
    n = tl.arange(0, N)
    d = tl.arange(0, C)
    r = tl.arange(0, R)[None, :]
    e = tl.arange(0, 2 * R)[None, :]
    g_ok = asks(g, several, G, ROWS)[:, None]
    q = Q + q_row + places(g, several, Q_STRIDE, D, G, ROWS)[:, None]
    q1 = tl.load(q + r, mask=g_ok, other=0.0).to(tl.float32)
    q2 = tl.load(q + R + r, mask=g_ok, other=0.0).to(tl.float32)
    q1, q2 = rotate(q1, q2, tl.load(COS + lo * R + r), -tl.load(SIN + lo * R + r))
    # The tables may end before N if the past does.
    cos = tl.load(COS + n[:, None] * R + r, mask=n[:, None] < past, other=0.0)
    sin = tl.load(SIN + n[:, None] * R + r, mask=n[:, None] < past, other=0.0)
    w1 = tl.load(W_NORM + r)
    w2 = tl.load(W_NORM + R + r)
    # In float16 pairs of numbers are rotated at once. A large w leaves its range only together with a large query.
    HALVES: tl.constexpr = tl.float16 == OPERAND
    if HALVES:
        q1 *= 16.0
        q2 *= 16.0
        w1 *= 1 / 16.0
        w2 *= 1 / 16.0
        cos1 = (cos * w1).to(tl.float16)
        sin1 = (sin * w1).to(tl.float16)
        cos2 = (cos * w2).to(tl.float16)
        sin2 = (sin * w2).to(tl.float16)
    step_cos = tl.load(COS + N * R + r, mask=(r >= 0) & (past > N), other=0.0)
    step_sin = tl.load(SIN + N * R + r, mask=(r >= 0) & (past > N), other=0.0)
    q_sum = tl.zeros([GROUP_ROWS], tl.float32)  # over dims that do not rotate
    start = tl.zeros([GROUP_ROWS], tl.float32)  # what scores start from, for raw numbers
    if APART:
        still = ()  # of planes 1 and on, two pieces each
        for part in tl.static_range(2, 2 * PLANES):
            at = part // 2 * W + part % 2 * R
            own_q, start, q_sum = _still(q + at + r, W_NORM + at + r, g_ok, start, q_sum, part // 2, CODE, OPERAND)
            still += (own_q,)
        if W > 2 * R:
            q03, start, q_sum = _still(q + 2 * R + e, W_NORM + 2 * R + e, g_ok, start, q_sum, 0, CODE, OPERAND)
            q13, start, q_sum = _still(q + W + 2 * R + e, W_NORM + W + 2 * R + e, g_ok, start, q_sum, 1, CODE, OPERAND)
    elif D > 2 * R:
        q3 = weighted(q + 2 * R + e, W_NORM + 2 * R + e, g_ok, OPERAND)
        q_sum += tl.sum(q3.to(tl.float32), 1)
    m = tl.full([GROUP_ROWS], -1e30, tl.float32)
    norm = tl.zeros([N, GROUP_ROWS], tl.float32)
    on_base = tl.zeros([N, GROUP_ROWS], tl.float32)
    sums = (tl.zeros([C, GROUP_ROWS], tl.float32),) * 4
    X = section(ARENA, n_offset, tl.int16)
    XS = section(ARENA, n_scales, tl.int32)
    if ONE_PAGE:
        next_page = _page_of(_first_read(lo, hi, first, ROWS), table, base, columns, P, STRIPES, RING)
    for i in range(lo, hi, N):
        t = i + n
        ok = (t >= first) & (t < past)
        # Rows that no token fills may be anything, and any code is a number: it counts for nothing.
        if ONE_PAGE:
            page = next_page.to(tl.int64)
            next_page = _page_of(tl.minimum(i + N, hi - 1), table, base, columns, P, STRIPES, RING)
            row = head * P + i % P
            scale, x_base = scales_of(XS + (page * (UNIT // 2) + row), n, ok, layer_scale, CODE, PER_ROW)
            words = X + (page * UNIT + row * ROW)
            x = words + (n * ROW)[:, None]
            v = words + (n * ROW)[None, :] + d[:, None]
        else:
            page = tl.load(table + column_of(t, base, columns, P, RING) * STRIPES, mask=ok, other=0).to(tl.int64)
            row = head * P + t % P
            scale, x_base = scales_of(XS, page * (UNIT // 2) + row, ok, layer_scale, CODE, PER_ROW)
            x = X + (page * UNIT + row * ROW)[:, None]
            v = X + (page * UNIT + row * ROW)[None, :] + d[:, None]
        if APART:
            x1 = tl.load(x + r)
            x2 = tl.load(x + R + r)
            y1 = plane(x1, 0, CODE, OPERAND)
            y2 = plane(x2, 0, CODE, OPERAND)
        else:
            y1 = dims_of(x, 0, R, ok[:, None], W, CODE, OPERAND)
            y2 = dims_of(x, R, R, ok[:, None], W, CODE, OPERAND)
        if HALVES:
            if CODE == 4:
                above = tl.broadcast_to((x_base / scale).to(tl.float16)[:, None], [N, R])
                y1 = halves_sum(y1, above)
                y2 = halves_sum(y2, above)
            k1 = halves_difference(y1, cos1, y2, sin2)
            k2 = halves_difference(y2, cos2, y1, -sin1)
        else:
            y1 = y1.to(tl.float32)
            y2 = y2.to(tl.float32)
            if CODE == 4:
                y1 += (x_base / scale)[:, None]
                y2 += (x_base / scale)[:, None]
            k1, k2 = rotate(y1 * w1, y2 * w2, cos, sin)
        s0 = add_scores(k1.to(OPERAND), _operand(q1, OPERAND), tl.zeros([N, GROUP_ROWS], tl.float32))
        s0 = add_scores(k2.to(OPERAND), _operand(q2, OPERAND), s0)
        q1, q2 = rotate(q1, q2, step_cos, -step_sin)
        s = tl.broadcast_to(start[None, :], [N, GROUP_ROWS])
        if APART:
            for piece in tl.static_range(len(still)):
                x_piece = x1 if piece % 2 == 0 else x2
                s = add_scores(plane(x_piece, piece // 2 + 1, CODE, OPERAND, True), still[piece], s)
            if W > 2 * R:
                x3 = tl.load(x + 2 * R + e)
                s = add_scores(plane(x3, 0, CODE, OPERAND, True), q03, s)
                s = add_scores(plane(x3, 1, CODE, OPERAND, True), q13, s)
        elif D > 2 * R:
            s = add_scores(dims_of(x, 2 * R, 2 * R, ok[:, None], W, CODE, OPERAND), q3, s)
        s = soft_capped(_scores(s + s0, scale, x_base, q_sum, scale_log2, CODE), CAP)
        seen = ok[:, None]
        if ROWS > 1:
            seen &= t[:, None] >= first_seen(g, several, G, CHUNKED)[None, :]
        p, alpha, m, norm, on_base = _probabilities(s, scale, x_base, seen, m, norm, on_base, CODE, OPERAND)
        sums = _add_values(v, p, alpha, sums, W, C, CODE, OPERAND)
    if ROWS > 1:
        _end_rows(
            Q + q_row, K_PRESENT, V_PRESENT, OUT, PART, LSE, SINKS, slot, head, past, m, norm, on_base, sums,
            scale_log2, whole, ends, several, W, THIRD, FOUR, OPERAND, G, D, CAP, ROWS, CHUNKED,
        )  # fmt: skip
    else:
        _end(
            Q + q_row, K_PRESENT, V_PRESENT, OUT, PART, LSE, SINKS, slot, head, m, norm, on_base, sums, scale_log2,
            whole, W, THIRD, FOUR, OPERAND, G, D, CAP,
        )  # fmt: skip


@triton.jit
def _first_read(lo, hi, first, ROWS: tl.constexpr):
    """Whose page is looked up first. An item may have no past: then it is a token that has an entry in the table."""
    return lo if ROWS == 1 else tl.where(lo < hi, lo, first)


@triton.jit
def _page_of(t, table, base, columns, P: tl.constexpr, STRIPES: tl.constexpr, RING: tl.constexpr):
    return tl.load(table + column_of(t, base, columns, P, RING) * STRIPES)


@triton.jit
def _still(q, w, g_ok, start, q_sum, PLACE: tl.constexpr, CODE: tl.constexpr, OPERAND: tl.constexpr):
    """Queries for dims that do not rotate, with w folded in, for raw numbers; and both sums, with theirs added."""
    operand, offset = for_raw(weighted(q, w, g_ok, OPERAND), PLACE, CODE, OPERAND)
    return operand, start + offset, q_sum + tl.sum(weighted(q, w, g_ok, tl.float32), 1)


@triton.jit
def _add_values(
    at, p, alpha, sums, W: tl.constexpr, C: tl.constexpr, CODE: tl.constexpr, OPERAND: tl.constexpr
):  # fmt: skip
    """Add V . p of one tile to sums [words, heads]: one per plane, or of two planes in two pieces of C words."""
    v = tl.load(at)
    more = ()
    for i in tl.static_range(4):
        if CODE != 4 and i == 2 and W > C:
            v = tl.load(at + C)
        if CODE == 4 or i < 2 or W > C:
            own = plane(v, i if CODE == 4 else i % 2, CODE, OPERAND)
            more += (tl.dot(own, p, sums[i] * alpha, input_precision="ieee"),)
        else:
            more += (sums[i],)
    return more


@triton.jit
def _operand(x, OPERAND: tl.constexpr):
    """Queries beyond float16's range do not occur; should one, it is cut off rather than infinite."""
    if tl.float16 == OPERAND:
        x = tl.clamp(x.to(tl.float32), -65504.0, 65504.0)
    return x.to(OPERAND)


@triton.jit
def _shift(OPERAND: tl.constexpr):
    """Probabilities in float16 are stored this many powers of two higher, so that small ones keep their bits."""
    return 15.0 if tl.float16 == OPERAND else 0.0


@triton.jit
def _scores(products, scale, base, q_sum, scale_log2, CODE: tl.constexpr):
    """Of products of queries and codes, [tokens, heads]."""
    s = products * (scale * scale_log2)[:, None]
    if CODE == 4:
        s += (base * scale_log2)[:, None] * q_sum[None, :]
    return s


@triton.jit
def _probabilities(s, v_scale, v_base, seen, m, norm, on_base, CODE: tl.constexpr, OPERAND: tl.constexpr):
    """Of one tile of scores [tokens, heads]: probabilities times V's scales, what sums shrink by, and what is kept."""
    s = tl.where(seen, s + tl.log2(v_scale)[:, None], float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 0))
    alpha = tl.exp2(m - m_new)[None, :]
    p = tl.exp2(s - m_new[None, :] + _shift(OPERAND))
    operand = p.to(OPERAND)
    weight = p / v_scale[:, None]
    norm = norm * alpha + weight
    if CODE == 4:
        on_base = on_base * alpha + weight * v_base[:, None]
    return operand, alpha, m_new, norm, on_base


@triton.jit
def _end(
    Q, K, V, OUT, PART, LSE, SINKS, slot, head, m, norm, on_base, sums, scale_log2, whole, W: tl.constexpr,
    THIRD: tl.constexpr, FOUR: tl.constexpr, OPERAND: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Leave an item's result, with the present token where nobody else has a part of the item."""
    g = tl.arange(0, m.shape[0])
    d = tl.arange(0, sums[0].shape[0])
    # The shift of probabilities is taken back.
    alpha = m * 0.0 + tl.exp2(-_shift(OPERAND))
    weight = m * 0.0
    beside = weight  # what weighs besides the past
    if whole:
        weight, shrink, m_new = present_weight(Q, K, m, scale_log2, G, D, CAP)
        alpha *= shrink
        beside = with_sinks(weight, m_new, SINKS, head * G + g, g < G)
    total = tl.sum(norm, 0) * alpha + beside
    alpha /= total
    weight /= total
    shared = tl.sum(on_base, 0)[None, :]
    at = slot * G + g
    for i in tl.static_range(4 if FOUR else 2):
        place = i // 2 * THIRD + i % 2 * W
        _leave(PART, OUT, V, at, place, d, sums[i] + shared, alpha, weight, whole, G, D)
    if not whole:
        tl.store(LSE + at, m + tl.log2(total), mask=g < G)


@triton.jit
def _end_rows(
    Q, K, V, OUT, PART, LSE, SINKS, slot, head, past, m, norm, on_base, sums, scale_log2, whole, ends, several,
    W: tl.constexpr, THIRD: tl.constexpr, FOUR: tl.constexpr, OPERAND: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    CAP: tl.constexpr, ROWS: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """As `_end`, for several rows: the segment's own tokens are one more tile of the program that has the last one."""
    QUERIES: tl.constexpr = m.shape[0]
    g = tl.arange(0, QUERIES)
    total = tl.sum(norm, 0)
    alpha = m * 0.0 + 1.0
    p = tl.zeros([PRESENT, QUERIES], OPERAND)
    if ends:
        q = Q + places(g, several, Q_STRIDE, D, G, ROWS)[:, None]
        PIECE: tl.constexpr = D if D < MOST_WORDS else MOST_WORDS
        s = present_scores(q, asks(g, several, G, ROWS)[:, None], K, past, several, PIECE, D, G, QUERIES)
        s = tl.where(seen_present(g, past, several, G, CHUNKED), soft_capped(s * scale_log2, CAP), float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        alpha = tl.exp2(m - m_new)
        weights = tl.exp2(s - m_new[None, :] + _shift(OPERAND))
        total = total * alpha + tl.sum(weights, 0)
        m = m_new
        p = weights.to(OPERAND)
    shared = tl.sum(on_base, 0)[None, :]
    back = tl.exp2(-_shift(OPERAND))  # the shift of probabilities is taken back
    for i in tl.static_range(4 if FOUR else 2):
        acc = (sums[i] + shared) * alpha[None, :]
        if ends:
            first = i // 2 * THIRD + i % 2 * W
            v = _operand(present_rows(V, several[V_STRIDE], first, past, several, acc.shape[0], G), OPERAND)
            acc = tl.dot(tl.trans(v), p, acc, input_precision="ieee")
        leave_rows(
            PART, LSE, OUT, SINKS, slot, head, m, total * back, tl.trans(acc) * back, whole, several,
            i // 2 * THIRD + i % 2 * W, D, G, ROWS,
        )  # fmt: skip


@triton.jit
def present_weight(Q, K, m, scale_log2, G: tl.constexpr, D: tl.constexpr, CAP: tl.constexpr):
    """What the present token weighs beside a maximum of m so far, what the sums so far shrink by, and the new m."""
    g = tl.arange(0, m.shape[0])[:, None]
    d = tl.arange(0, D)[None, :]
    q = tl.load(Q + g * D + d, mask=g < G, other=0.0).to(tl.float32)
    s = soft_capped(tl.sum(q * tl.load(K + d).to(tl.float32), 1) * scale_log2, CAP)
    m_new = tl.maximum(m, s)
    return tl.exp2(s - m_new), tl.exp2(m - m_new), m_new


@triton.jit
def _leave(PART, OUT, V, at, first, d, acc, alpha, weight, whole, G: tl.constexpr, D: tl.constexpr):
    """Some dims of an item's result, [dims, heads]: to the output with the present token, or as a partial result."""
    g = tl.arange(0, acc.shape[1])
    sums = tl.trans(acc) * alpha[:, None]
    ok = (g < G)[:, None]
    if whole:
        sums += weight[:, None] * tl.load(V + first + d).to(tl.float32)[None, :]
        tl.store(OUT + g[:, None] * D + first + d[None, :], sums.to(OUT.dtype.element_ty), mask=ok)
    else:
        tl.store(PART + at[:, None] * D + first + d[None, :], sums, mask=ok)
