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
#define MR 12
#define NV 2
#endif
#define NR (NV * LANES)

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long rounded_up(long count, long whole) { return (count + whole - 1) / whole * whole; }

INLINE void multiply(const float *rows, const float *outputs, long depth, vec total[MR][NV]) {
    for (long i = 0; i < depth; i++, rows += MR, outputs += NR) {
        vec w[NV];
        UNROLL for (int n = 0; n < NV; n++) w[n] = LOAD(outputs + n * LANES);
#if LANES == 4 /* one instruction multiplies by a vector's element */
        UNROLL for (int half = 0; half < MR; half += 4) {
            vec x = LOAD(rows + half);
            UNROLL for (int m = 0; m < 4; m++)
                UNROLL for (int n = 0; n < NV; n++) total[half + m][n] += w[n] * x[m];
        }
#else
        UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NV; n++) total[m][n] += w[n] * rows[m];
#endif
    }
}

/* out[m, n] (+)= rows · outputs, of which only the first `some_rows` and `some_outputs` are wanted. */
static __attribute__((noinline, unused)) void tile(const float *rows, const float *outputs, long depth, float *out,
                                                   long stride, long some_rows, long some_outputs, int adds) {
    vec total[MR][NV];
    UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NV; n++) total[m][n] = (vec){0};
    multiply(rows, outputs, depth, total);
    if (some_rows >= MR && some_outputs >= NR) {
        UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NV; n++) {
            float *to = out + m * stride + n * LANES;
            if (adds) total[m][n] += LOAD(to);
            STORE(to, total[m][n]);
        }
        return;
    }
    float all[MR][NR];
    UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NV; n++) STORE(all[m] + n * LANES, total[m][n]);
    for (long m = 0; m < least(some_rows, MR); m++)
        for (long n = 0; n < least(some_outputs, NR); n++)
            out[m * stride + n] = adds ? out[m * stride + n] + all[m][n] : all[m][n];
}

/* Up to `width` rows of x become a panel [depth, width], zeros in the place of rows that are not there. */
INLINE void pack(const float *x, long stride, long rows, long depth, float *panel, const int width) {
    long i = 0;
#if LANES == 4
    if (rows >= width)
        for (; i + 4 <= depth; i += 4, panel += 4 * width)
            UNROLL for (int r = 0; r < width; r += 4) { /* four rows of four, turned */
                const float *from = x + r * stride + i;
                vec r0 = LOAD(from), r1 = LOAD(from + stride), r2 = LOAD(from + 2 * stride), r3 = LOAD(from + 3 * stride);
                vec even01 = __builtin_shuffle(r0, r1, (ivec){0, 4, 2, 6}), odd01 = __builtin_shuffle(r0, r1, (ivec){1, 5, 3, 7});
                vec even23 = __builtin_shuffle(r2, r3, (ivec){0, 4, 2, 6}), odd23 = __builtin_shuffle(r2, r3, (ivec){1, 5, 3, 7});
                STORE(panel + r, __builtin_shuffle(even01, even23, (ivec){0, 1, 4, 5}));
                STORE(panel + width + r, __builtin_shuffle(odd01, odd23, (ivec){0, 1, 4, 5}));
                STORE(panel + 2 * width + r, __builtin_shuffle(even01, even23, (ivec){2, 3, 6, 7}));
                STORE(panel + 3 * width + r, __builtin_shuffle(odd01, odd23, (ivec){2, 3, 6, 7}));
            }
#endif
    for (; i < depth; i++, panel += width)
        for (long r = 0; r < width; r++) panel[r] = r < rows ? x[r * stride + i] : 0;
}
