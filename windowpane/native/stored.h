/* Rows of K, V or a latent as they lie in pages, and their conversion to float32 in registers. The yardstick is
 * device/codecs.py: what is rounded or coded here has the same bits there.
 *
 * An int8 row is a line of 16-bit words. Word j holds the codes of dims j (low byte) and dim / 2 + j, each plus 128; the
 * row's float32 scale lies in a section of its own. So a row is read in PIECES(format) runs of consecutive dims.
 */

#pragma once

#include "vectors.h"

enum { FLOAT32, FLOAT16, BFLOAT16, INT8 };

#define PIECES(format) ((format) == INT8 ? 2 : 1)
#define INT8_MOST 127
#define INT8_BIAS 128
#define TINIEST_SCALE 0x1p-100f
#define ROUNDER 12582912.0f /* added and taken away again, it rounds to whole numbers, ties to even */

/* One layer's K and V, or its latent, in all pages of the arena. */
typedef struct {
    char *rows[2], *scales[2]; /* those of the page at offset 0, by head and token; scales of int8 only */
    int64_t block_tokens, row_bytes, format;
} Pages;

typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define LOAD_HALVES(p) (*(const halves *)(p))
#define STORE_HALVES(p, v) (*(halves *)(p) = (v))

INLINE vec from_float16(halves h) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps((__m256i)h);
#elif LANES == 8 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)h));
#else
    ivec wide = __builtin_convertvector(h, ivec), magnitude = (wide & 0x7fff) << 13;
    vec finite = (vec)magnitude * 0x1p112f; /* the exponents' biases differ by 112 */
    return choose(wide << 16 >> 31, -1 + (vec){0}, 1 + (vec){0})
           * choose(magnitude >= 0x7c00 << 13, (vec)(magnitude | 0x7f800000), finite);
#endif
}

/* Rounded to nearest, ties to even; what is too large becomes infinite. */
INLINE halves to_float16(vec x) {
#if LANES == 16
    return (halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif LANES == 8 && defined(__F16C__)
    return (halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
    return (halves)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x));
#else
    ivec bits = (ivec)x, magnitude = bits & 0x7fffffff;
    ivec normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10);
    ivec subnormal = (ivec)((vec)magnitude + 0.5f) - 0x3f000000; /* 0.5 has its last bit where they have theirs */
    ivec infinite = 0x7c00 + ((magnitude > 0x7f800000) & 0x200);
    ivec small = magnitude < 0x38800000, large = magnitude >= 0x47800000;
    ivec codes = (small & subnormal) | (large & infinite) | (~(small | large) & normal);
    return __builtin_convertvector(codes | (bits >> 16 & 0x8000), halves);
#endif
}

INLINE vec from_bfloat16(halves h) { return (vec)(__builtin_convertvector(h, uvec) << 16); }

INLINE halves to_bfloat16(vec x) {
    uvec bits = (uvec)x;
    return __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, halves);
}

/* LANES numbers of a row from the i-th of a piece on; of int8 without the scale. */
INLINE vec load_stored(const char *row, long i, const int piece, const int format) {
    if (format == FLOAT32) return LOAD((const float *)row + i);
    if (format == FLOAT16) return from_float16(LOAD_HALVES((const uint16_t *)row + i));
    if (format == BFLOAT16) return from_bfloat16(LOAD_HALVES((const uint16_t *)row + i));
    ivec words = __builtin_convertvector(LOAD_HALVES((const uint16_t *)row + i), ivec);
    return __builtin_convertvector((words >> 8 * piece & 0xff) - INT8_BIAS, vec);
}

/* The nearest number not below a positive x whose last 8 bits are 0: times a code it is exact in float32. */
INLINE float rounded_up_scale(float x) {
    union { float number; uint32_t bits; } u = {x};
    u.bits = (u.bits + 0xff) & ~0xffu;
    return u.number;
}

/* `scale` is written for int8 only. dim is a multiple of 16, for int8 of 32. */
INLINE void encode_row(const float *x, long dim, char *row, char *scale, const int format) {
    if (format == FLOAT32) memcpy(row, x, 4 * dim);
    if (format == FLOAT16)
        for (long i = 0; i < dim; i += LANES) STORE_HALVES((uint16_t *)row + i, to_float16(LOAD(x + i)));
    if (format == BFLOAT16)
        for (long i = 0; i < dim; i += LANES) STORE_HALVES((uint16_t *)row + i, to_bfloat16(LOAD(x + i)));
    if (format != INT8) return;
    vec mosts = {0};
    for (long i = 0; i < dim; i += LANES) {
        vec magnitude = (vec)((ivec)LOAD(x + i) & 0x7fffffff);
        mosts = choose(magnitude > mosts, magnitude, mosts);
    }
    float most = 0;
    for (int i = 0; i < LANES; i++) most = mosts[i] > most ? mosts[i] : most;
    most = rounded_up_scale(most / INT8_MOST > TINIEST_SCALE ? most / INT8_MOST : TINIEST_SCALE);
    memcpy(scale, &most, 4);
    for (long i = 0; i < dim / 2; i += LANES) {
        vec low = LOAD(x + i) / most + ROUNDER, high = LOAD(x + dim / 2 + i) / most + ROUNDER;
        ivec codes = __builtin_convertvector(low - ROUNDER, ivec) + INT8_BIAS;
        codes |= (__builtin_convertvector(high - ROUNDER, ivec) + INT8_BIAS) << 8;
        STORE_HALVES((uint16_t *)row + i, __builtin_convertvector(codes, halves));
    }
}

INLINE void decode_row(const char *row, const char *scale, long dim, float *out, const int format) {
    float factor = 1;
    if (format == INT8) memcpy(&factor, scale, 4);
    long wide = dim / PIECES(format);
    for (int piece = 0; piece < PIECES(format); piece++)
        for (long i = 0; i < wide; i += LANES)
            STORE(out + piece * wide + i, load_stored(row, i, piece, format) * factor);
}

/* `call` is an expression with a constant `format` in it. */
#define BY_FORMAT(which, call) \
    do switch (which) { \
        case FLOAT16: { enum { format = FLOAT16 }; call; } break; \
        case BFLOAT16: { enum { format = BFLOAT16 }; call; } break; \
        case INT8: { enum { format = INT8 }; call; } break; \
        default: { enum { format = FLOAT32 }; call; } \
    } while (0)
