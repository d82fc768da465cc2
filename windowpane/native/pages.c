#include "kernels.h"

/* -- rows to pages and back, and the basis that coded rows are stored in --------------------------------------------- */

static long row_at(const Pages *p, long head, long token) { return head * p->block_tokens + token; }

/* Rows [count, heads, dim], `stride` floats apart, into pages: each at its page's offset and token. */
void write_rows(const Pages *p, int part, const int64_t *offsets, const int64_t *within, const float *rows, long stride,
                long count, long heads, long dim, int threads) {
#pragma omp parallel for num_threads(threads_for(count * heads * dim, threads)) schedule(static)
    for (long r = 0; r < count; r++)
        for (long h = 0; h < heads; h++) {
            long at = row_at(p, h, within[r]), page = offsets[r] * 256;
            char *to = p->rows[part] + page + at * p->row_bytes, *scale = p->scales[part] + page + at * 4;
            BY_FORMAT(p->format, encode_row(rows + r * stride + h * dim, dim, to, scale, format));
        }
}

/* Tokens [first, first + count) of one sequence as float32 [heads, …, dim], heads `head_stride` floats apart. `offsets`
 * are those of its pages from the first token's on. */
void read_rows(const Pages *p, int part, const int64_t *offsets, long first, long count, float *out, long head_stride,
               long heads, long dim, int threads) {
    long first_block = first / p->block_tokens;
#pragma omp parallel for num_threads(threads_for(count * heads * dim, threads)) schedule(static) collapse(2)
    for (long h = 0; h < heads; h++)
        for (long token = first; token < first + count; token++) {
            long at = row_at(p, h, token % p->block_tokens), page = offsets[token / p->block_tokens - first_block] * 256;
            const char *from = p->rows[part] + page + at * p->row_bytes, *scale = p->scales[part] + page + at * 4;
            BY_FORMAT(p->format, decode_row(from, scale, dim, out + h * head_stride + (token - first) * dim, format));
        }
}

INLINE void row_through(const float *x, float *out, long dim, const int format) {
    char row[4 * dim], scale[4];
    encode_row(x, dim, row, scale, format);
    decode_row(row, scale, dim, out, format);
}

/* What rows are once stored and loaded. x [rows, heads, dim] may be `out`. */
void through_format(const float *x, long x_stride, float *out, long rows, long heads, long dim, int which, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * heads * dim, threads)) schedule(static)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++)
            BY_FORMAT(which, row_through(x + r * x_stride + h * dim, out + (r * heads + h) * dim, dim, format));
}

/* A row times the Hadamard matrix, but for its factor: sums and differences of numbers 1, 2, 4, … apart. */
INLINE void hadamard(float *x, long dim) {
    for (long i = 0; i < dim; i += LANES) {
        vec v = LOAD(x + i);
        UNROLL for (int apart = 1; apart < LANES; apart *= 2) {
            vec signs;
            UNROLL for (int lane = 0; lane < LANES; lane++) signs[lane] = lane & apart ? -1 : 1;
            v = neighbours(v, apart) + v * signs;
        }
        STORE(x + i, v);
    }
    for (long apart = LANES; apart < dim; apart *= 2)
        for (long at = 0; at < dim; at += 2 * apart)
            for (long i = at; i < at + apart; i += LANES) {
                vec a = LOAD(x + i), b = LOAD(x + i + apart);
                STORE(x + i, a + b);
                STORE(x + i + apart, a - b);
            }
}

/* Rows [rows, heads, dim] into the basis that they are stored in, or out of it; dim is a power of two. Where there is a
 * balance [heads / heads_each, dim], rows are multiplied with it before. x may be `out`. */
void transform_rows(const float *x, long x_stride, const float *balance, long heads_each, float *out, long rows,
                    long heads, long dim, int threads) {
    float factor = 1.0f / __builtin_sqrtf(dim);
#pragma omp parallel for num_threads(threads_for(rows * heads * dim, threads)) schedule(static)
    for (long r = 0; r < rows; r++)
        for (long h = 0; h < heads; h++) {
            const float *from = x + r * x_stride + h * dim, *weights = balance + h / heads_each * dim;
            float *to = out + (r * heads + h) * dim;
            for (long i = 0; i < dim; i += LANES) {
                vec v = LOAD(from + i) * factor;
                if (balance) v *= LOAD(weights + i);
                STORE(to + i, v);
            }
            hadamard(to, dim);
        }
}
