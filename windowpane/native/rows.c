#include "kernels.h"

/* -- norms, rotation, activations: one pass over each row ---------------------------------------------------------- */

INLINE float inverse_rms(const float *x, long width, float eps) {
    vec squares = {0};
    for (long i = 0; i < width; i += LANES) squares += LOAD(x + i) * LOAD(x + i);
    return 1.0f / __builtin_sqrtf(sum(squares) / width + eps);
}

/* out = norm(x) · weight, plus residual where there is one. width is a multiple of 16. */
void rms_norm(const float *x, const float *weight, const float *residual, float *out, long rows, long width, float eps,
              int threads) {
#pragma omp parallel for num_threads(threads_for(rows * width, threads)) schedule(static)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * width;
        float scale = inverse_rms(from, width, eps);
        for (long i = 0; i < width; i += LANES) {
            vec y = LOAD(from + i) * scale * LOAD(weight + i);
            if (residual) y += LOAD(residual + row * width + i);
            STORE(out + row * width + i, y);
        }
    }
}

/* Heads of each row: normed (with a weight, without one, or not at all) and rotated by the row's angles (or not).
 * cos and sin are [rows, dim / 2]; dim is a multiple of 32. */
void heads(const float *x, long x_stride, int normed, const float *weight, const float *cos, const float *sin,
           float *out, long rows, long count, long dim, float eps, int threads) {
    long half = dim / 2;
#pragma omp parallel for num_threads(threads_for(rows * count * dim, threads)) schedule(static)
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < count; head++) {
            const float *from = x + row * x_stride + head * dim;
            float *to = out + (row * count + head) * dim;
            float scale = normed ? inverse_rms(from, dim, eps) : 1.0f;
            for (long i = 0; i < half; i += LANES) {
                vec a = LOAD(from + i) * scale, b = LOAD(from + half + i) * scale;
                if (weight) a *= LOAD(weight + i), b *= LOAD(weight + half + i);
                if (cos) {
                    vec c = LOAD(cos + row * half + i), s = LOAD(sin + row * half + i), rotated = a * c - b * s;
                    b = b * c + a * s;
                    a = rotated;
                }
                STORE(to + i, a);
                STORE(to + half + i, b);
            }
        }
}

/* out = activation(gate) · up, of rows [gate | up]. Both activations are g / (1 + e^-z). */
void gated(const float *gate_up, float *out, long rows, long width, int is_gelu, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * width, threads)) schedule(static)
    for (long row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        for (long i = 0; i < width; i += LANES) {
            vec g = LOAD(gate + i), z = g;
            if (is_gelu) z = 1.5957691216057308f * (g + 0.044715f * g * g * g); /* 2 · √(2/π) */
            STORE(out + row * width + i, g / (1.0f + exponential(-z)) * LOAD(up + i));
        }
    }
}

#define SEARCHED 4096

/* The place of the first of the highest numbers of each row; NaN is passed over. */
void highest_places(const float *x, long x_stride, int64_t *out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * width, threads)) schedule(static)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * x_stride;
        float highest = -__builtin_inff();
        long place = 0;
        for (long block = 0; block < width; block += SEARCHED) {
            long i = block, stop = width - block < SEARCHED ? width : block + SEARCHED;
            vec highs = -__builtin_inff() + (vec){0};
            for (; i + LANES <= stop; i += LANES) highs = larger(LOAD(from + i), highs);
            float high = highs[0];
            for (int lane = 1; lane < LANES; lane++) high = highs[lane] > high ? highs[lane] : high;
            for (; i < stop; i++) high = from[i] > high ? from[i] : high;
            if (high > highest) highest = high, place = block;
        }
        while (place < width && from[place] != highest) place++;
        out[row] = place < width ? place : 0;
    }
}
