/* Products of many rows, the way processors like them: both sides lie in panels that are read forwards, and a tile of
 * MR × NR results stays in registers while a panel of either side passes.
 *
 *     panel of rows     [depth, MR]        panel of outputs  [depth, NR]
 */

#pragma once

#include "vectors.h"

#if LANES == 4
#define MR 8
#define NV 3
#elif LANES == 8 /* 16 registers */
#define MR 6
#define NV 2
#else
#define MR 8
#define NV 3
#endif
#define NR (NV * LANES)
#define BLOCK_ROWS (128 / MR * MR) /* that pass over a panel of outputs while it is near */

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long rounded_up(long count, long whole) { return (count + whole - 1) / whole * whole; }

/* M rows: their panel is [depth, M]. */
INLINE void multiply(const float *rows, const float *outputs, long depth, vec total[MR][NV], const int M) {
    for (long i = 0; i < depth; i++, rows += M, outputs += NR) {
        vec w[NV];
        UNROLL for (int n = 0; n < NV; n++) w[n] = LOAD(outputs + n * LANES);
        if (LANES == 4 && M % 4 == 0) { /* one instruction multiplies by a vector's element */
            UNROLL for (int m = 0; m < M; m += 4) {
                vec x = LOAD(rows + m);
                UNROLL for (int e = 0; e < 4; e++)
                    UNROLL for (int n = 0; n < NV; n++) total[m + e][n] += w[n] * x[e];
            }
        } else {
            UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < NV; n++) total[m][n] += w[n] * rows[m];
        }
    }
}

/* out[m, n] (+)= rows · outputs, of which only the first `some_rows` and `some_outputs` are wanted. A result has the same
 * bits for every M. */
INLINE void tile_of(const float *rows, const float *outputs, long depth, float *out, long stride, long some_rows,
                    long some_outputs, int adds, const int M) {
    vec total[MR][NV];
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < NV; n++) total[m][n] = (vec){0};
    if (adds)
        for (int m = 0; m < M && m < some_rows; m++) __builtin_prefetch(out + m * stride, 1);
    multiply(rows, outputs, depth, total, M);
    if (some_rows >= M && some_outputs >= NR) {
        UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < NV; n++) {
            float *to = out + m * stride + n * LANES;
            if (adds) total[m][n] += LOAD(to);
            STORE(to, total[m][n]);
        }
        return;
    }
    float all[MR][NR];
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < NV; n++) STORE(all[m] + n * LANES, total[m][n]);
    for (long m = 0; m < least(some_rows, M); m++)
        for (long n = 0; n < least(some_outputs, NR); n++)
            out[m * stride + n] = adds ? out[m * stride + n] + all[m][n] : all[m][n];
}

static __attribute__((noinline, unused)) void tile(const float *rows, const float *outputs, long depth, float *out,
                                                   long stride, long some_rows, long some_outputs, int adds) {
    tile_of(rows, outputs, depth, out, stride, some_rows, some_outputs, adds, MR);
}

/* Square blocks of v trade places across the diagonal, 1, 2, 4 and 8 lanes wide: v[i][j] and v[j][i] change. */
#define FROM_LOW(s, j) ((j) & (s) ? LANES + (j) - (s) : (j))
#define FROM_HIGH(s, j) ((j) & (s) ? LANES + (j) : (j) + (s))
#define FOUR(F, s, j) F(s, j), F(s, j + 1), F(s, j + 2), F(s, j + 3)
#if LANES == 4
#define ALL(F, s) FOUR(F, s, 0)
#elif LANES == 8
#define ALL(F, s) FOUR(F, s, 0), FOUR(F, s, 4)
#else
#define ALL(F, s) FOUR(F, s, 0), FOUR(F, s, 4), FOUR(F, s, 8), FOUR(F, s, 12)
#endif
#define EXCHANGE(s)                                                        \
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & (s))) {               \
        vec low = v[i], high = v[i + (s)];                                 \
        v[i] = SHUFFLE(low, high, ALL(FROM_LOW, s));                       \
        v[i + (s)] = SHUFFLE(low, high, ALL(FROM_HIGH, s));                \
    }

INLINE void transpose(vec v[LANES]) {
    EXCHANGE(1)
    EXCHANGE(2)
#if LANES > 4
    EXCHANGE(4)
#endif
#if LANES > 8
    EXCHANGE(8)
#endif
}

/* Up to `width` rows, each at its own place, become a panel [depth, width], zeros in the place of missing ones. */
INLINE void pack_rows(const float *const *from, long rows, long depth, float *panel, const int width) {
    long whole = depth / LANES * LANES;
    /* A few rows over all of the depth: processors fetch only so many streams ahead. */
    for (int r = 0; r < width; r += LANES)
        for (long i = 0; i < whole; i += LANES) {
            float *to = panel + i * width + r;
            vec v[LANES];
            UNROLL for (int l = 0; l < LANES; l++) v[l] = r + l < width && r + l < rows ? LOAD(from[r + l] + i) : (vec){0};
            transpose(v);
            /* What a store writes beyond the width the next one overwrites. */
            UNROLL for (int l = 0; l < LANES; l++) {
                if (l < LANES - 1 || width - r >= LANES) STORE(to + l * width, v[l]);
                else memcpy(to + l * width, v + l, 4 * (width - r));
            }
        }
    for (long i = whole; i < depth; i++)
        for (long r = 0; r < width; r++) panel[i * width + r] = r < rows ? from[r][i] : 0;
}

/* The same for rows that are `stride` floats apart. */
INLINE void pack(const float *x, long stride, long rows, long depth, float *panel, const int width) {
    const float *from[64];
    for (long r = 0; r < width; r++) from[r] = x + (r < rows ? r : 0) * stride;
    pack_rows(from, rows, depth, panel, width);
}
