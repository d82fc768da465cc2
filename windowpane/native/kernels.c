/* Kernels for float32 on CPUs, compiled on the machine they run on (see build.py).
 *
 * Written with the compiler's own vectors, so that one source serves NEON, AVX2 and AVX-512. All rows are independent:
 * a row's result has the same bits whatever rows stand beside it and however many threads run.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define LOAD(p) (*(const vec *)(p))
#define STORE(p, v) (*(vec *)(p) = (v))

INLINE float sum(vec v) {
    float total = 0;
    UNROLL for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

INLINE vec choose(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }

INLINE vec clamp(vec x, float low, float high) {
    vec lows = low + (vec){0}, highs = high + (vec){0};
    x = choose(x < lows, lows, x);
    return choose(x > highs, highs, x);
}

/* e^x to about one unit in the last place: 2^n times a polynomial in what is left. */
INLINE vec exponential(vec x) {
    x = clamp(x, -87.0f, 88.0f);
    vec n = x * 1.44269504088896341f + 12582912.0f; /* rounds to whole numbers */
    n -= 12582912.0f;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = 1.9875691500e-4f + (vec){0};
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    return p * (vec)power;
}

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

INLINE void tile(const float *x, const float *w, long k, const float *bias, float *out, long out_stride, const int M,
                 const int N) {
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
        for (; n + N <= outputs; n += N) tile(x, w + n * k, k, bias ? bias + n : 0, out + n, out_stride, M, N);        \
        for (; n < outputs; n++) tile(x, w + n * k, k, bias ? bias + n : 0, out + n, out_stride, M, 1);                \
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
void linear(const float *x, long x_stride, const float *w, const float *bias, float *out, float *packed, long rows,
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

/* -- norms, rotation, activations: one pass over each row ---------------------------------------------------------- */

INLINE float inverse_rms(const float *x, long width, float eps) {
    vec squares = {0};
    for (long i = 0; i < width; i += LANES) squares += LOAD(x + i) * LOAD(x + i);
    return 1.0f / __builtin_sqrtf(sum(squares) / width + eps);
}

/* out = norm(x) · weight, plus residual where there is one. width is a multiple of 16. */
void rms_norm(const float *x, const float *weight, const float *residual, float *out, long rows, long width, float eps,
              int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
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

/* Heads of each row: normed (with a weight, without one, or not at all) and turned by the row's angles (or not).
 * cos and sin are [rows, dim / 2]; dim is a multiple of 32. */
void heads(const float *x, long x_stride, int normed, const float *weight, const float *cos, const float *sin,
           float *out, long rows, long count, long dim, float eps, int threads) {
    long half = dim / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < count; head++) {
            const float *from = x + row * x_stride + head * dim;
            float *to = out + (row * count + head) * dim;
            float scale = normed ? inverse_rms(from, dim, eps) : 1.0f;
            for (long i = 0; i < half; i += LANES) {
                vec a = LOAD(from + i) * scale, b = LOAD(from + half + i) * scale;
                if (weight) a *= LOAD(weight + i), b *= LOAD(weight + half + i);
                if (cos) {
                    vec c = LOAD(cos + row * half + i), s = LOAD(sin + row * half + i), turned = a * c - b * s;
                    b = b * c + a * s;
                    a = turned;
                }
                STORE(to + i, a);
                STORE(to + half + i, b);
            }
        }
}

/* out = activation(gate) · up, of rows [gate | up]. Both activations are g / (1 + e^-z). */
void gated(const float *gate_up, float *out, long rows, long width, int is_gelu, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        for (long i = 0; i < width; i += LANES) {
            vec g = LOAD(gate + i), z = g;
            if (is_gelu) z = 1.5957691216057308f * (g + 0.044715f * g * g * g); /* 2 · √(2/π) */
            STORE(out + row * width + i, g / (1.0f + exponential(-z)) * LOAD(up + i));
        }
    }
}

/* -- attention of decoding tokens, straight from pages --------------------------------------------------------------
 *
 * Past tokens are taken in parts of PART, counted from the first that a token can see, so that one long sequence keeps
 * all threads busy and its result depends on nobody else. A part leaves its highest score, the sum of its weights and
 * its weighted values; the parts are then put together. The token itself joins the first part.
 */

#define PART 256
#define MOST_HEADS 4 /* query heads of one KV head that are taken together */

typedef struct {
    const char *keys, *values;      /* the arena, at this layer's K and V of the page at offset 0 */
    const int64_t *offsets;         /* [sequences, blocks] of pages, in units of 256 bytes */
    const int64_t *starts, *stops;  /* [sequences]: past positions that count */
    const float *queries;           /* [sequences, query heads, dim] */
    const float *now_keys, *now_values; /* [sequences, KV heads, dim] */
    float *partial;                 /* [sequences, KV heads, parts, query heads of a KV head, dim + 16] */
    float *out;                     /* as queries */
    int64_t sequences, blocks, parts, block_tokens, query_heads, kv_heads, dim, row_floats;
    float scale;
} Attention;

INLINE void scores_of(const float *q, const float *const *keys, long dim, float scale, float *scores, const int G,
                      const int T) {
    vec total[MOST_HEADS][4];
    UNROLL for (int g = 0; g < G; g++) UNROLL for (int t = 0; t < T; t++) total[g][t] = (vec){0};
    for (long i = 0; i < dim; i += LANES)
        UNROLL for (int t = 0; t < T; t++) {
            vec k = LOAD(keys[t] + i);
            UNROLL for (int g = 0; g < G; g++) total[g][t] += k * LOAD(q + g * dim + i);
        }
    UNROLL for (int g = 0; g < G; g++)
        UNROLL for (int t = 0; t < T; t++) scores[g * (PART + 1) + t] = sum(total[g][t]) * scale;
}

INLINE void add_values(const float *weights, const float *const *values, long dim, float *out, long out_stride,
                       const int G, const int T) {
    for (long i = 0; i < dim; i += LANES) {
        vec v[4];
        UNROLL for (int t = 0; t < T; t++) v[t] = LOAD(values[t] + i);
        UNROLL for (int g = 0; g < G; g++) {
            vec total = LOAD(out + g * out_stride + i);
            UNROLL for (int t = 0; t < T; t++) total += weights[g * (PART + 1) + t] * v[t];
            STORE(out + g * out_stride + i, total);
        }
    }
}

/* The highest score and the sum of weights end up behind each head's values. */
INLINE void part_of_heads(const float *q, const float *const *keys, const float *const *values, long tokens, long dim,
                          float scale, float *out, const int G) {
    float scores[MOST_HEADS * (PART + 1)];
    long t = 0, stride = dim + 16;
    for (; t + 4 <= tokens; t += 4) scores_of(q, keys + t, dim, scale, scores + t, G, 4);
    for (; t < tokens; t++) scores_of(q, keys + t, dim, scale, scores + t, G, 1);
    for (int g = 0; g < G; g++) {
        float *s = scores + g * (PART + 1), highest = -__builtin_inff(), total = 0;
        for (t = 0; t < tokens; t++) highest = s[t] > highest ? s[t] : highest;
        for (t = 0; t < tokens; t += LANES) {
            float some[LANES] = {0};
            long n = tokens - t < LANES ? tokens - t : LANES;
            for (long i = 0; i < n; i++) some[i] = s[t + i] - highest;
            vec weights = exponential(LOAD(some));
            for (long i = 0; i < n; i++) total += s[t + i] = weights[i];
        }
        memset(out + g * stride, 0, 4 * dim);
        out[g * stride + dim] = highest;
        out[g * stride + dim + 1] = total;
    }
    for (t = 0; t + 4 <= tokens; t += 4) add_values(scores + t, values + t, dim, out, stride, G, 4);
    for (; t < tokens; t++) add_values(scores + t, values + t, dim, out, stride, G, 1);
}

static void one_part(const Attention *a, long sequence, long head, long part) {
    const float *keys[PART + 1], *values[PART + 1];
    long first_block = a->starts[sequence] / a->block_tokens, tokens = 0;
    long from = a->starts[sequence] + part * PART, to = from + PART;
    if (to > a->stops[sequence]) to = a->stops[sequence];
    for (long at = from; at < to; at++, tokens++) {
        int64_t page = a->offsets[sequence * a->blocks + at / a->block_tokens - first_block] * 256;
        long row = (head * a->block_tokens + at % a->block_tokens) * a->row_floats;
        keys[tokens] = (const float *)(a->keys + page) + row;
        values[tokens] = (const float *)(a->values + page) + row;
    }
    if (part == 0) {
        keys[tokens] = a->now_keys + (sequence * a->kv_heads + head) * a->dim;
        values[tokens++] = a->now_values + (sequence * a->kv_heads + head) * a->dim;
    }
    long group = a->query_heads / a->kv_heads, stride = a->dim + 16;
    const float *q = a->queries + (sequence * a->query_heads + head * group) * a->dim;
    float *out = a->partial + ((sequence * a->kv_heads + head) * a->parts + part) * group * stride;
    for (long g = 0, few; g < group; g += few, q += few * a->dim, out += few * stride) {
        few = group - g < MOST_HEADS ? group - g : MOST_HEADS;
        switch (few) {
            case 4: part_of_heads(q, keys, values, tokens, a->dim, a->scale, out, 4); break;
            case 3: part_of_heads(q, keys, values, tokens, a->dim, a->scale, out, 3); break;
            case 2: part_of_heads(q, keys, values, tokens, a->dim, a->scale, out, 2); break;
            default: part_of_heads(q, keys, values, tokens, a->dim, a->scale, out, 1);
        }
    }
}

static long parts_of(const Attention *a, long sequence) {
    long past = a->stops[sequence] - a->starts[sequence];
    return past > PART ? (past + PART - 1) / PART : 1;
}

static void put_together(const Attention *a, long sequence, long query_head) {
    long group = a->query_heads / a->kv_heads, stride = a->dim + 16, parts = parts_of(a, sequence);
    long head = query_head / group;
    const float *partial = a->partial + ((sequence * a->kv_heads + head) * a->parts * group + query_head % group) * stride;
    float *out = a->out + (sequence * a->query_heads + query_head) * a->dim;
    float highest = partial[a->dim], total = 0;
    for (long p = 1; p < parts; p++) {
        float of_part = partial[p * group * stride + a->dim];
        highest = of_part > highest ? of_part : highest;
    }
    memset(out, 0, 4 * a->dim);
    for (long p = 0; p < parts; p++) {
        const float *from = partial + p * group * stride;
        float weight = exponential(from[a->dim] - highest + (vec){0})[0];
        total += weight * from[a->dim + 1];
        for (long i = 0; i < a->dim; i += LANES) STORE(out + i, LOAD(out + i) + weight * LOAD(from + i));
    }
    for (long i = 0; i < a->dim; i += LANES) STORE(out + i, LOAD(out + i) / total);
}

void attend_decoding(const Attention *a, int threads) {
    long parts = a->sequences * a->kv_heads * a->parts, outputs = a->sequences * a->query_heads;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (long i = 0; i < parts; i++) {
            long part = i % a->parts, head = i / a->parts % a->kv_heads, sequence = i / a->parts / a->kv_heads;
            if (part < parts_of(a, sequence)) one_part(a, sequence, head, part);
        }
#pragma omp for schedule(static)
        for (long i = 0; i < outputs; i++) put_together(a, i / a->query_heads, i % a->query_heads);
    }
}

/* Rows [sequences, heads, dim] into pages: one row of each sequence, at its page's offset and row. */
void write_rows(char *to, const int64_t *offsets, const int64_t *within, const float *rows, long sequences, long heads,
                long dim, long block_tokens, long row_floats) {
    for (long s = 0; s < sequences; s++)
        for (long h = 0; h < heads; h++)
            memcpy((float *)(to + offsets[s] * 256) + (h * block_tokens + within[s]) * row_floats,
                   rows + (s * heads + h) * dim, 4 * dim);
}
