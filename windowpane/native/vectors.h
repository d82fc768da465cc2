/* What all kernels are made of: the compiler's own vectors, so that one source serves NEON, AVX2 and AVX-512.
 *
 * Kernels are for float32 on CPUs and compiled on the machine they run on (see build.py). All rows are independent: a
 * row's result has the same bits whatever rows stand beside it and however many threads run.
 */

#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

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

#if defined(__clang__)
#define SHUFFLE(low, high, ...) __builtin_shufflevector(low, high, __VA_ARGS__)
#else
#define SHUFFLE(low, high, ...) __builtin_shuffle(low, high, (ivec){__VA_ARGS__})
#endif

/* Lanes that are `apart` (1, 2, 4 or 8) trade places. Clang makes one instruction of the loop, GCC does not. */
INLINE vec neighbours(vec v, const int apart) {
#if defined(__clang__)
    vec found;
    UNROLL for (int lane = 0; lane < LANES; lane++) found[lane] = v[lane ^ apart];
    return found;
#else
    ivec from;
    UNROLL for (int lane = 0; lane < LANES; lane++) from[lane] = lane ^ apart;
    return __builtin_shuffle(v, from);
#endif
}

INLINE float sum(vec v) {
#if defined(__aarch64__) && LANES == 4
    return vaddvq_f32(v);
#else
    float total = 0;
    UNROLL for (int i = 0; i < LANES; i++) total += v[i];
    return total;
#endif
}

INLINE vec choose(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }

/* The larger of each pair; a NaN in x gives y. */
INLINE vec larger(vec x, vec y) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return choose(x > y, x, y);
#endif
}

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

/* A polynomial where 1 - 2 / (e^2x + 1) would lose the last bits of a small x. */
INLINE vec hyperbolic_tangent(vec x) {
    vec z = x * x, p = -5.70498872745e-3f + (vec){0};
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return choose(z < 0.390625f + (vec){0}, p * z * x + x, 1 - 2 / (exponential(x + x) + 1));
}

INLINE vec soft_capped(vec scores, float cap) { return hyperbolic_tangent(scores / cap) * cap; }
