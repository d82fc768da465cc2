#include "panels.h"

/* -- out[rows, n] = x[rows, k] · w[n, k]ᵀ for few rows -------------------------------------------------------------
 *
 * A library's product repacks the whole weight on each call, which costs more than the product when rows are few. Here
 * the few rows are packed instead ([k / LANES, rows, LANES], so that they are one stream), and weights are read once,
 * in place: a tile of M rows × N outputs lives in registers, and the next tile's weights are fetched meanwhile.
 */

#if defined(__AVX2__) && !defined(__AVX512F__) /* 16 registers */
#define MOST_ROWS 4
#define TILE1 8
#define TILE2 4
#define TILE4 3
#else /* 32 registers */
#define MOST_ROWS 8
#define TILE1 8
#define TILE2 8
#define TILE4 6
#define TILE6 4
#define TILE8 3
#endif

#define OUTPUTS 48                 /* of a block: its weights stay in the second-level cache while rows pass over them */
#define LINE (16 / LANES)          /* vectors in a cache line */

INLINE void few_by_few(const float *x, const float *w, long k, const float *bias, float *out, long out_stride,
                       const int M, const int N) {
    vec total[8][8];
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int n = 0; n < N; n++) total[m][n] = (vec){0};
    for (long at = 0; at < k; at += 16) {
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
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int n = 0; n < N; n++) out[m * out_stride + n] = sum(total[m][n]) + (bias ? bias[n] : 0);
}

#define STRIP(M, N)                                                                                                    \
    static __attribute__((noinline)) void strip##M(const float *x, const float *w, long k, const float *bias,         \
                                                   float *out, long out_stride, long outputs) {                        \
        long n = 0;                                                                                                    \
        for (; n + N <= outputs; n += N)                                                                               \
            few_by_few(x, w + n * k, k, bias ? bias + n : 0, out + n, out_stride, M, N);                               \
        for (; n < outputs; n++) few_by_few(x, w + n * k, k, bias ? bias + n : 0, out + n, out_stride, M, 1);          \
    }

STRIP(1, TILE1)
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

/* k is a multiple of 16; packed has room for rows × k floats. */
void product_of_few(const float *x, long x_stride, const float *w, const float *bias, float *out, float *packed, long rows,
            long n, long k, int threads) {
    float *p = packed;
    for (long row = 0, few; row < rows; row += few) {
        few = rows_at_once(rows - row);
        for (long at = 0; at < k; at += LANES)
            for (long i = 0; i < few; i++, p += LANES) STORE(p, LOAD(x + (row + i) * x_stride + at));
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long first = 0; first < n; first += OUTPUTS) {
        long outputs = n - first < OUTPUTS ? n - first : OUTPUTS;
        const float *weights = w + first * k, *biases = bias ? bias + first : 0;
        for (long row = 0, few; row < rows; row += few) {
            few = rows_at_once(rows - row);
            const float *from = packed + row * k;
            float *to = out + row * n + first;
            switch (few) {
#if MOST_ROWS == 8
                case 8: strip8(from, weights, k, biases, to, n, outputs); break;
                case 6: strip6(from, weights, k, biases, to, n, outputs); break;
#endif
                case 4: strip4(from, weights, k, biases, to, n, outputs); break;
                case 2: strip2(from, weights, k, biases, to, n, outputs); break;
                default: strip1(from, weights, k, biases, to, n, outputs);
            }
        }
    }
}

/* -- the same for many rows -------------------------------------------------------------------------------------------
 *
 * All weights are packed into panels once; then each thread takes blocks of rows and outputs, and packs its rows, a
 * part of their width at a time, so that they stay in the second-level cache while the outputs' panels pass.
 */

#define BLOCK_ROWS (128 / MR * MR)
#define BLOCK_OUTPUTS (80 * NR)
#define DEPTH 512 /* most of the width that is taken at a time: a panel of outputs then fits the first-level cache */

/* Floats that `packed` needs. */
long product_packed_floats(long n, long k) { return rounded_up(n, NR) * k; }

static void block_of_many(const float *x, long x_stride, const float *packed, float *out, long rows, long first,
                          long last, long n, long k, float *mine) {
    long parts = (k + DEPTH - 1) / DEPTH, most = rounded_up((k + parts - 1) / parts, 4);
    for (long at = 0; at < k; at += most) {
        long depth = least(most, k - at);
        for (long m = 0; m < rows; m += MR) pack(x + m * x_stride + at, x_stride, rows - m, depth, mine + m * depth, MR);
        for (long o = first; o < last; o += NR)
            for (long m = 0; m < rows; m += MR)
                tile(mine + m * depth, packed + o * k + at * NR, depth, out + m * n + o, n, rows - m, last - o, at > 0);
    }
}

void product_of_many(const float *x, long x_stride, const float *w, const float *bias, float *out, float *packed,
                     long rows, long n, long k, int threads) {
#pragma omp parallel num_threads(threads)
    {
        float *mine = aligned_alloc(64, 4 * rounded_up(BLOCK_ROWS * DEPTH, 16));
#pragma omp for schedule(static)
        for (long o = 0; o < n; o += NR) pack(w + o * k, k, n - o, k, packed + o * k, NR);
#pragma omp for collapse(2) schedule(dynamic)
        for (long row = 0; row < rows; row += BLOCK_ROWS)
            for (long first = 0; first < n; first += BLOCK_OUTPUTS) {
                long some = least(rows - row, BLOCK_ROWS), last = least(first + BLOCK_OUTPUTS, n);
                block_of_many(x + row * x_stride, x_stride, packed, out + row * n, some, first, last, n, k, mine);
                for (long r = row; bias && r < row + some; r++)
                    for (long o = first; o < last; o++) out[r * n + o] += bias[o];
            }
        free(mine);
    }
}
