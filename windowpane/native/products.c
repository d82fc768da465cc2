#include "kernels.h"
#include "panels.h"

/* -- out[rows, n] = x[rows, k] · w[n, k]ᵀ for few rows -------------------------------------------------------------
 *
 * A library's product repacks the whole weight on each call, which costs more than the product when rows are few. Here
 * the few rows are packed instead ([k / LANES, rows, LANES], so that they are one stream), and weights are read once,
 * in place: a tile of M rows × N outputs lives in registers, and the next tile's weights are fetched meanwhile.
 */

#if defined(__AVX2__) && !defined(__AVX512F__) /* 16 registers */
#define MOST_ROWS 4
#define TILE2 4
#define TILE4 3
#else /* 32 registers */
#define MOST_ROWS 8
#define TILE2 8
#define TILE4 6
#define TILE6 4
#define TILE8 3
#endif

#define OUTPUTS 48        /* of a block: its weights stay in the second-level cache while rows pass over them */
#define WIDTH 704         /* most of the width that is taken at a time: the rows then fit the first-level cache */
#define LINE (16 / LANES) /* vectors in a cache line */

INLINE void few_by_few(const float *x, const float *w, long k, long depth, const float *bias, float *out,
                       long out_stride, int adds, const int M, const int N) {
    vec total[8][8];
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < N; n++) total[m][n] = (vec){0};
    for (long at = 0; at < depth; at += 16) {
        UNROLL for (int n = 0; n < N; n++) __builtin_prefetch(w + (n + N) * k + at);
        UNROLL for (int u = 0; u < LINE; u++) {
            vec b[8];
            UNROLL for (int n = 0; n < N; n++) b[n] = LOAD(w + n * k + at + u * LANES);
            UNROLL for (int m = 0; m < M; m++, x += LANES) {
                vec a = LOAD(x);
                UNROLL for (int n = 0; n < N; n++) total[m][n] += a * b[n];
            }
        }
    }
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < N; n++) {
        float *to = out + m * out_stride + n;
        *to = sum(total[m][n]) + (adds ? *to : bias ? bias[n] : 0);
    }
}

#define STRIP(M, N)                                                                                                    \
    static __attribute__((noinline)) void strip##M(const float *x, const float *w, long k, long depth,                \
                                                   const float *bias, float *out, long out_stride, long outputs,      \
                                                   int adds) {                                                         \
        long n = 0;                                                                                                    \
        for (; n + N <= outputs; n += N)                                                                               \
            few_by_few(x, w + n * k, k, depth, bias ? bias + n : 0, out + n, out_stride, adds, M, N);                  \
        for (; n < outputs; n++)                                                                                       \
            few_by_few(x, w + n * k, k, depth, bias ? bias + n : 0, out + n, out_stride, adds, M, 1);                  \
    }

STRIP(1, 1)
STRIP(2, TILE2)
STRIP(4, TILE4)
#if MOST_ROWS == 8
STRIP(6, TILE6)
STRIP(8, TILE8)
#endif

static int rows_at_once(long left) {
    if (left >= MOST_ROWS) return MOST_ROWS;
#if MOST_ROWS == 8
    if (left >= 6) return 6;
#endif
    return left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

static void strip(const float *x, const float *w, long k, long depth, const float *bias, float *out, long n,
                  long outputs, int adds, long rows) {
    switch (rows) {
#if MOST_ROWS == 8
        case 8: strip8(x, w, k, depth, bias, out, n, outputs, adds); break;
        case 6: strip6(x, w, k, depth, bias, out, n, outputs, adds); break;
#endif
        case 4: strip4(x, w, k, depth, bias, out, n, outputs, adds); break;
        case 2: strip2(x, w, k, depth, bias, out, n, outputs, adds); break;
        default: strip1(x, w, k, depth, bias, out, n, outputs, adds);
    }
}

/* One row: nothing is shared, so weights are one stream, as memory likes it best. */
static void product_of_one(const float *x, const float *w, const float *bias, float *out, long n, long k, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long o = 0; o < n; o++) {
        vec total[8];
        long i = 0;
        UNROLL for (int a = 0; a < 8; a++) total[a] = (vec){0};
        for (; i + 8 * LANES <= k; i += 8 * LANES)
            UNROLL for (int a = 0; a < 8; a++) total[a] += LOAD(x + i + a * LANES) * LOAD(w + o * k + i + a * LANES);
        for (; i < k; i += LANES) total[0] += LOAD(x + i) * LOAD(w + o * k + i);
        UNROLL for (int a = 0; a < 4; a++) total[a] += total[a + 4];
        out[o] = sum((total[0] + total[1]) + (total[2] + total[3])) + (bias ? bias[o] : 0);
    }
}

/* k is a multiple of 16; packed has room for rows × k floats. */
void product_of_few(const float *x, long x_stride, const float *w, const float *bias, float *out, float *packed,
                    long rows, long n, long k, int threads) {
    if (rows == 1) {
        product_of_one(x, w, bias, out, n, k, threads);
        return;
    }
    long parts = (k + WIDTH - 1) / WIDTH, most = rounded_up((k + parts - 1) / parts, 16);
    float *p = packed;
    for (long at = 0; at < k; at += most)
        for (long row = 0, few; row < rows; row += few) {
            few = rows_at_once(rows - row);
            for (long i = at; i < least(at + most, k); i += LANES)
                for (long r = 0; r < few; r++, p += LANES) STORE(p, LOAD(x + (row + r) * x_stride + i));
        }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long first = 0; first < n; first += OUTPUTS)
        for (long at = 0; at < k; at += most) {
            long depth = least(most, k - at);
            for (long row = 0, few; row < rows; row += few) {
                few = rows_at_once(rows - row);
                strip(packed + rows * at + row * depth, w + first * k + at, k, depth, bias ? bias + first : 0,
                      out + row * n + first, n, least(OUTPUTS, n - first), at > 0, few);
            }
        }
}

/* -- the same for many rows -------------------------------------------------------------------------------------------
 *
 * All weights are packed into panels once; then each thread takes blocks of rows and outputs, and packs its rows, a
 * part of their width at a time, so that they stay in the second-level cache while the outputs' panels pass.
 */

#define BLOCK_OUTPUTS (80 * NR)
#define DEPTH (6144 / NR) /* most that a tile takes at a time: a panel of outputs then fits the first-level cache */
#define AT_ONCE (1024 / DEPTH) /* such parts whose packed rows fit the second-level cache */

/* Floats that `packed` needs. */
long product_packed_floats(long n, long k) { return rounded_up(n, NR) * k; }

/* All weights [n, k] into panels. */
void pack_outputs(const float *w, float *packed, long n, long k, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long o = 0; o < n; o += NR) pack(w + o * k, k, n - o, k, packed + o * k, NR);
}

/* Floats that `mine` of `product_block` needs. */
long product_block_floats(void) { return BLOCK_ROWS * DEPTH * AT_ONCE; }

/* Few rows have narrower panels, so that nothing is computed for rows that are not there. */
INLINE int panel_rows(long left) { return left > 4 ? MR : left > 2 ? 4 : left; }

static void pack_panel(const float *const *from, long at, long rows, long depth, float *panel) {
    const float *shifted[MR];
    for (long r = 0; r < MR; r++) shifted[r] = from[r < rows ? r : 0] + at;
    switch (panel_rows(rows)) {
        case 1: memcpy(panel, shifted[0], 4 * depth); break;
        case 2: pack_rows(shifted, rows, depth, panel, 2); break;
        case 4: pack_rows(shifted, rows, depth, panel, 4); break;
        default: pack_rows(shifted, rows, depth, panel, MR);
    }
}

#define TILE(M)                                                                                                        \
    static __attribute__((noinline)) void tile##M(const float *rows, const float *outputs, long depth, float *out,     \
                                                  long stride, long some_rows, long some_outputs, int adds) {          \
        tile_of(rows, outputs, depth, out, stride, some_rows, some_outputs, adds, M);                                  \
    }
TILE(1)
TILE(2)
TILE(4)

/* out[rows, first to last of n] = up to BLOCK_ROWS rows, each at its own place, · packed weights. */
void product_block(const float *const *from, long rows, const float *packed, float *out, long out_stride, long first,
                   long last, long k, float *mine) {
    long parts = (k + DEPTH - 1) / DEPTH, most = rounded_up((k + parts - 1) / parts, 16), whole = rounded_up(rows, MR);
    for (long start = 0, stop; start < k; start = stop) {
        stop = least(start + AT_ONCE * most, k);
        for (long at = start; at < stop; at += most)
            for (long m = 0; m < rows; m += MR) {
                long depth = least(most, stop - at);
                pack_panel(from + m, at, rows - m, depth, mine + (at - start) * whole + m * depth);
            }
        for (long o = first; o < last; o += NR)
            for (long at = start; at < stop; at += most) {
                long depth = least(most, stop - at), share = rounded_up((depth * NR * MR) / whole, 16);
                const float *panel = packed + o * k + at * NR, *next = panel + depth * NR;
                for (long m = 0; m < rows; m += MR, next += share) {
                    const float *mine_at = mine + (at - start) * whole + m * depth;
                    float *to = out + m * out_stride + o;
                    /* What the next tiles read comes near meanwhile; memory behind the last panel is never loaded. */
                    if (rows > 4)
                        for (long i = 0; i < share; i += 16) __builtin_prefetch(next + i, 0, 2);
                    switch (panel_rows(rows - m)) {
                        case 1: tile1(mine_at, panel, depth, to, out_stride, rows - m, last - o, at > 0); break;
                        case 2: tile2(mine_at, panel, depth, to, out_stride, rows - m, last - o, at > 0); break;
                        case 4: tile4(mine_at, panel, depth, to, out_stride, rows - m, last - o, at > 0); break;
                        default: tile(mine_at, panel, depth, to, out_stride, rows - m, last - o, at > 0);
                    }
                }
            }
    }
}

void product_of_many(const float *x, long x_stride, const float *w, const float *bias, float *out, float *packed,
                     long rows, long n, long k, int threads) {
    pack_outputs(w, packed, n, k, threads);
#pragma omp parallel num_threads(threads)
    {
        float *mine = aligned_alloc(64, 4 * rounded_up(product_block_floats(), 16));
#pragma omp for collapse(2) schedule(dynamic)
        for (long row = 0; row < rows; row += BLOCK_ROWS)
            for (long first = 0; first < n; first += BLOCK_OUTPUTS) {
                long some = least(rows - row, BLOCK_ROWS), last = least(first + BLOCK_OUTPUTS, n);
                const float *from[BLOCK_ROWS];
                for (long r = 0; r < some; r++) from[r] = x + (row + r) * x_stride;
                product_block(from, some, packed, out + row * n, n, first, last, k, mine);
                for (long r = row; bias && r < row + some; r++)
                    for (long o = first; o < last; o++) out[r * n + o] += bias[o];
            }
        free(mine);
    }
}
