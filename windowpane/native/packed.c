#include "packed.h"
#include "stored.h"


#define PARTS (STRIP / LANES) /* vectors to a strip */
#if LANES == 16
#define MOST_ROWS 8
#else /* fewer registers, or more vectors to a strip */
#define MOST_ROWS 4
#endif

typedef uint8_t bytes __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int8_t signed_bytes __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint16_t words __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

/* -- sums of products of four neighbouring inputs, added up in 32 bits ------------------------------------------------
 *
 * `w` are the values of a group's eight steps, of which [first, first + count) are multiplied. Unsigned values have at
 * most 6 bits, so that two products fit 16 bits, and a few such pairs can be added before they are widened.
 */

INLINE int32_t four(const int8_t *x) {
    int32_t all;
    memcpy(&all, x, 4);
    return all;
}

#if defined(__AVX512BW__)
#define SPREAD(x) _mm512_set1_epi32(four(x))
#elif defined(__AVX2__)
#define SPREAD(x) _mm256_set1_epi32(four(x))
#endif

#if !defined(__AVX2__) && !defined(__ARM_FEATURE_DOTPROD)
static __attribute__((noinline)) ivec plain_dots(const bytes w[8], int first, int count, const int8_t *x, int is_signed) {
    ivec total = {0};
    for (int s = first; s < first + count; s++)
        for (int o = 0; o < LANES; o++)
            for (int b = 0; b < 4; b++) {
                uint8_t value = w[s][4 * o + b];
                total[o] += (is_signed ? (int8_t)value : value) * x[4 * s + b];
            }
    return total;
}
#endif

INLINE ivec dots(const bytes w[8], const int first, const int count, const int8_t *x, const int bits) {
    (void)bits;
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
    __m512i total = _mm512_setzero_si512();
    UNROLL for (int s = first; s < first + count; s++) total = _mm512_dpbusd_epi32(total, (__m512i)w[s], SPREAD(x + 4 * s));
    return (ivec)total;
#elif defined(__AVX2__) && defined(__AVXVNNI__) && !defined(__AVX512BW__)
    __m256i total = _mm256_setzero_si256();
    UNROLL for (int s = first; s < first + count; s++) total = _mm256_dpbusd_avx_epi32(total, (__m256i)w[s], SPREAD(x + 4 * s));
    return (ivec)total;
#elif defined(__AVX2__)
    const int chain = bits <= 4 ? 8 : bits == 5 ? 4 : 2;
    ivec total = {0};
    UNROLL for (int s = first; s < first + count; s += chain) {
#if defined(__AVX512BW__)
        __m512i pairs = _mm512_maddubs_epi16((__m512i)w[s], SPREAD(x + 4 * s));
        UNROLL for (int c = 1; c < chain; c++)
            if (s + c < first + count)
                pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16((__m512i)w[s + c], SPREAD(x + 4 * (s + c))));
        total += (ivec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
        __m256i pairs = _mm256_maddubs_epi16((__m256i)w[s], SPREAD(x + 4 * s));
        UNROLL for (int c = 1; c < chain; c++)
            if (s + c < first + count)
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)w[s + c], SPREAD(x + 4 * (s + c))));
        total += (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
    }
    return total;
#elif defined(__ARM_FEATURE_DOTPROD)
    int32x4_t total = vdupq_n_s32(0);
    UNROLL for (int s = first; s < first + count; s++)
        total = vdotq_s32(total, (int8x16_t)w[s], vreinterpretq_s8_s32(vdupq_n_s32(four(x + 4 * s))));
    return (ivec)total;
#else
    return plain_dots(w, first, count, x, 0);
#endif
}

/* The same for signed values of 8 bits. */
INLINE ivec signed_dots(const bytes w[8], const int8_t *x, int32_t sum) {
    (void)sum;
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
    __m512i total = _mm512_set1_epi32(-128 * sum); /* w + 128 is not negative */
    UNROLL for (int s = 0; s < 8; s++)
        total = _mm512_dpbusd_epi32(total, (__m512i)(w[s] ^ 0x80), SPREAD(x + 4 * s));
    return (ivec)total;
#elif defined(__AVX512BW__)
    ivec total = {0};
    UNROLL for (int s = 0; s < 8; s++) { /* |w| times x with the sign of w */
        __m512i v = (__m512i)w[s], y = SPREAD(x + 4 * s);
        y = _mm512_mask_sub_epi8(y, _mm512_movepi8_mask(v), _mm512_setzero_si512(), y);
        total += (ivec)_mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(v), y), _mm512_set1_epi16(1));
    }
    return total;
#elif defined(__AVX2__)
    ivec total = {0};
    UNROLL for (int s = 0; s < 8; s++) {
        __m256i v = (__m256i)w[s], y = _mm256_sign_epi8(SPREAD(x + 4 * s), v);
        total += (ivec)_mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(v), y), _mm256_set1_epi16(1));
    }
    return total;
#elif defined(__ARM_FEATURE_DOTPROD)
    return dots(w, 0, 8, x, 8);
#else
    return plain_dots(w, 0, 8, x, 1);
#endif
}

INLINE bytes look_up(bytes at, const int8_t *table) {
#if defined(__AVX512BW__)
    return (bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)), (__m512i)at);
#elif defined(__AVX2__)
    return (bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), (__m256i)at);
#elif defined(__aarch64__)
    return (bytes)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)at);
#else
    bytes found;
    for (int i = 0; i < 4 * LANES; i++) found[i] = (uint8_t)table[at[i]];
    return found;
#endif
}

/* The values of step s, LANES outputs of it. */
INLINE bytes step_of(const uint8_t *group, const int s, const int low, const int high) {
#define AT(line) (*(const words *)(group + (line) * LINE_BYTES))
    if (low == 8) return (bytes)AT(s);
    words v = low == 4 ? (s < 4 ? AT(s % 4) : AT(s % 4) >> 4) & 0x0f0f : (AT(s / 4) >> 2 * (s % 4)) & 0x0303;
    if (high == 1) {
        const uint16_t bit = (uint16_t)(0x0101 << low);
        v |= (s < low ? AT(low) << (low - s) : AT(low) >> (s - low)) & bit;
    }
    if (high == 2) {
        const int shift = 4 - 2 * (s % 4);
        v |= (shift > 0 ? AT(low + s / 4) << shift : AT(low + s / 4) >> -shift) & 0x3030;
    }
    return (bytes)v;
#undef AT
}

/* -- scales ------------------------------------------------------------------------------------------------------------ */

typedef int8_t few_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint8_t few_unsigned __attribute__((vector_size(LANES), aligned(1), may_alias));

/* LANES bytes as whole numbers. GCC would convert them one by one. */
INLINE ivec widened(const uint8_t *from, const int is_signed) {
#if defined(__AVX512F__)
    __m128i b = _mm_loadu_si128((const __m128i *)from);
    return (ivec)(is_signed ? _mm512_cvtepi8_epi32(b) : _mm512_cvtepu8_epi32(b));
#elif defined(__AVX2__)
    __m128i b = _mm_loadl_epi64((const __m128i *)from);
    return (ivec)(is_signed ? _mm256_cvtepi8_epi32(b) : _mm256_cvtepu8_epi32(b));
#else
    return is_signed ? __builtin_convertvector(*(const few_bytes *)from, ivec)
                     : __builtin_convertvector(*(const few_unsigned *)from, ivec);
#endif
}

/* to = what is stored in float16 × sign, of sixteen outputs. */
INLINE void float16s(const uint8_t *from, float sign, float *to) {
    UNROLL for (int i = 0; i < STRIP; i += LANES) STORE(to + i, from_float16(LOAD_HALVES(from + 2 * i)) * sign);
}

/* to = all × what is stored in a byte, of sixteen outputs. */
INLINE void relative(const uint8_t *from, const float *all, float *to, const int is_signed) {
    UNROLL for (int i = 0; i < STRIP; i += LANES) {
        STORE(to + i, LOAD(all + i) * __builtin_convertvector(widened(from + i, is_signed), vec));
    }
}

/* Groups [first, first + count) of a strip whose scales are WIDE; `zero` are whole numbers. */
INLINE void wide_scales_of(const Packed *w, const uint8_t *scales, long first, long count, float *scale, int32_t *zero,
                           const int has_zeros) {
    long last = wide_scales(w) - 1;
    const uint8_t *zeros = scales + (last + 1) * STRIP * 4;
    for (long i = 0; i < count; i++) {
        long at = (first + i) * GROUP / w->scaled;
        if (at > last) at = last; /* padding */
        UNROLL for (int p = 0; p < STRIP; p += LANES) {
            STORE(scale + i * STRIP + p, LOAD(scales + (at * STRIP + p) * 4));
            if (has_zeros)
                *(ivec *)(zero + i * STRIP + p) = widened(zeros + at / 2 * STRIP + p, 0) >> 4 * (at % 2) & 15;
        }
    }
}

/* Of inputs [first, first + inputs) of a strip: [inputs / scaled, 16] floats each. What is stored as q means
 * scale × (q - zero) - offset. first is a multiple of 256. */
INLINE void scales_of(const uint8_t *scales, long first, long inputs, float *scale, float *offset, const Form f) {
    const uint8_t *at = scales + scale_bytes(&f, first);
    long count = inputs / f.scaled, small = SPAN / f.scaled * STRIP;
    float all[STRIP], all_offset[STRIP];
    switch (f.scales) {
        case HALF:
            for (long i = 0; i < count; i++) float16s(at + i * STRIP * 2, 1, scale + i * STRIP);
            break;
        case HALF_AND_OFFSET:
            for (long i = 0; i < count; i++) {
                float16s(at + i * STRIP * 4, 1, scale + i * STRIP);
                float16s(at + i * STRIP * 4 + STRIP * 2, -1, offset + i * STRIP);
            }
            break;
        case RELATIVE:
            float16s(at, 1, all);
            for (long i = 0; i < count; i++) relative(at + (2 + i) * STRIP, all, scale + i * STRIP, 1);
            break;
        case RELATIVE_AND_OFFSET:
            float16s(at, 1, all);
            float16s(at + STRIP * 2, 1, all_offset);
            for (long i = 0; i < count; i++) {
                relative(at + (4 + i) * STRIP, all, scale + i * STRIP, 0);
                relative(at + (4 + i) * STRIP + small, all_offset, offset + i * STRIP, 0);
            }
            break;
        default:
            for (long i = 0; i < count * STRIP; i += LANES) { /* 2^(e - 127) / 2, because the table holds doubled values */
                ivec e = widened(at + i, 0), tiny = e < 2;
                STORE(scale + i, (vec)((tiny & 0x00200000 << (e & 1)) | (~tiny & (e - 1) << 23)));
            }
    }
}

/* Hardware fetches ahead only within a page of 4 KiB, and few rows take less time than memory does. */
#define AHEAD_BYTES 4096

/* -- a strip times R rows ------------------------------------------------------------------------------------------------
 *
 * Sums of a group are whole numbers; they are scaled and added up group by group, in the same order for any R, so that
 * a row has the same bits whatever rows stand beside it.
 */

INLINE void strip_of(const Packed *w, long strip, const Inputs *x, const float *bias, float *out, long out_stride,
                     const long kind, const int R) {
    const Form f = form_of(kind);
    const int per_group = GROUP / f.scaled, bits = f.low + f.high, offsets = has_offsets(&f);
    const long groups = w->inputs / GROUP;
    const uint8_t *group = w->values + strip * groups * group_bytes(&f);
    const uint8_t *scales = w->scales + strip * strip_scale_bytes(w, &f);
    const int is_wide = f.scales >= WIDE, has_zeros = f.scales == WIDE_AND_ZERO;
    float scale[SPAN], offset[SPAN];
    int32_t zero[SPAN_GROUPS * STRIP];
    vec total[PARTS][MOST_ROWS];
    UNROLL for (int p = 0; p < PARTS; p++) UNROLL for (int r = 0; r < R; r++) total[p][r] = (vec){0};
    for (long span = 0; span < groups; span += SPAN_GROUPS) {
        long some = groups - span < SPAN_GROUPS ? groups - span : SPAN_GROUPS;
        if (is_wide) wide_scales_of(w, scales, span, some, scale, zero, has_zeros);
        else scales_of(scales, span * GROUP, some * GROUP, scale, offset, f);
        for (long g = 0; g < some; g++, group += group_bytes(&f), x++) {
            if (R <= 4) UNROLL for (long at = 0; at < group_bytes(&f); at += LINE_BYTES) __builtin_prefetch(group + AHEAD_BYTES + at);
            UNROLL for (int p = 0; p < PARTS; p++) {
                bytes v[8];
                UNROLL for (int s = 0; s < 8; s++) {
                    v[s] = step_of(group + p * 4 * LANES, s, f.low, f.high);
                    if (f.is_indexed) v[s] = look_up(v[s], table_of(kind));
                }
                UNROLL for (int half = 0; half < per_group; half++) {
                    const long at = (g * per_group + half) * STRIP + p * LANES;
                    const int steps = 8 / per_group, sum = per_group == 1 ? 0 : 1 + half;
                    UNROLL for (int r = 0; r < R; r++) {
                        const Inputs *in = x + r * groups;
                        ivec d = f.low == 8 || f.is_indexed ? signed_dots(v, in->values, in->sums[0])
                                                            : dots(v, half * steps, steps, in->values, bits);
                        if (f.zero) d -= f.zero * in->sums[sum];
                        if (has_zeros) d -= *(const ivec *)(zero + at) * in->sums[sum];
                        total[p][r] += __builtin_convertvector(d, vec) * (LOAD(scale + at) * in->scale);
                        if (offsets) total[p][r] -= LOAD(offset + at) * in->weighted[sum];
                    }
                }
            }
        }
    }
    long first = strip * STRIP, last = w->outputs - first;
    if (last >= STRIP) {
        UNROLL for (int p = 0; p < PARTS; p++)
            UNROLL for (int r = 0; r < R; r++) {
                if (bias) total[p][r] += LOAD(bias + first + p * LANES);
                STORE(out + r * out_stride + first + p * LANES, total[p][r]);
            }
        return;
    }
    for (int r = 0; r < R; r++) {
        float all[STRIP];
        UNROLL for (int p = 0; p < PARTS; p++) STORE(all + p * LANES, total[p][r]);
        for (long o = 0; o < last; o++) out[r * out_stride + first + o] = bias ? all[o] + bias[first + o] : all[o];
    }
}

INLINE vec wide_at(const uint8_t *from, const int is_brain) {
    return is_brain ? from_bfloat16(LOAD_HALVES(from)) : from_float16(LOAD_HALVES(from));
}

/* Weights in 16 bits that are floating point: [inputs, 16] of a strip, times rows of floats. Four sums for each output,
 * so that one row does not wait for its own last addition. */
INLINE void half_strip_of(const Packed *w, long strip, const float *x, long x_stride, const float *bias, float *out,
                          long out_stride, const int is_brain, const int R) {
    const uint8_t *from = w->values + strip * w->inputs * STRIP * 2;
    long first = strip * STRIP, last = w->outputs - first;
    UNROLL for (int p = 0; p < PARTS; p++) {
        vec total[4][4];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int a = 0; a < 4; a++) total[r][a] = (vec){0};
        for (long i = 0; i < w->inputs; i += 4)
            UNROLL for (int a = 0; a < 4; a++) {
                vec v = wide_at(from + ((i + a) * STRIP + p * LANES) * 2, is_brain);
                UNROLL for (int r = 0; r < R; r++) total[r][a] += v * x[r * x_stride + i + a];
            }
        UNROLL for (int r = 0; r < R; r++) {
            float all[LANES];
            STORE(all, (total[r][0] + total[r][1]) + (total[r][2] + total[r][3]));
            for (long o = 0; o < LANES && p * LANES + o < last; o++)
                out[r * out_stride + first + p * LANES + o] = all[o] + (bias ? bias[first + p * LANES + o] : 0);
        }
    }
}

/* E4M3, without its NaN: behind a fifth bit of exponent it is a float16 of a 256th. */
INLINE vec from_fp8(const uint8_t *from) {
    halves h = __builtin_convertvector(*(const few_unsigned *)from, halves);
    return from_float16((h & 0x80) << 8 | (h & 0x7f) << 7) * 256;
}

/* Of the scales of FP8, those of output `p` and its neighbours for the inputs of number `at`. */
INLINE vec fp8_scale(const Packed *w, long strip, long at, long p) {
    const float *scales = (const float *)w->scales;
    if (w->scaled_outputs > 1) return scales[strip * STRIP / w->scaled_outputs * wide_scales(w) + at] + (vec){0};
    return LOAD(scales + (strip * wide_scales(w) + at) * STRIP + p);
}

/* As `half_strip_of`, for FP8: [inputs, 16] of a strip. Sums are scaled where their inputs share a scale. */
INLINE void fp8_strip_of(const Packed *w, long strip, const float *x, long x_stride, const float *bias, float *out,
                         long out_stride, const int R) {
    const uint8_t *from = w->values + strip * w->inputs * STRIP;
    long first = strip * STRIP, last = w->outputs - first;
    UNROLL for (int p = 0; p < PARTS; p++) {
        vec total[4], part[4][4];
        UNROLL for (int r = 0; r < R; r++) total[r] = (vec){0};
        for (long i = 0, at = 0; i < w->columns; at++) {
            long stop = (at + 1) * w->scaled < w->columns ? (at + 1) * w->scaled : w->columns;
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int a = 0; a < 4; a++) part[r][a] = (vec){0};
            for (; i < stop; i += 4)
                UNROLL for (int a = 0; a < 4; a++) {
                    vec v = from_fp8(from + (i + a) * STRIP + p * LANES);
                    UNROLL for (int r = 0; r < R; r++) part[r][a] += v * x[r * x_stride + i + a];
                }
            vec scale = fp8_scale(w, strip, at, p * LANES);
            UNROLL for (int r = 0; r < R; r++) total[r] += ((part[r][0] + part[r][1]) + (part[r][2] + part[r][3])) * scale;
        }
        UNROLL for (int r = 0; r < R; r++)
            for (long o = 0; o < LANES && p * LANES + o < last; o++)
                out[r * out_stride + first + p * LANES + o] = total[r][o] + (bias ? bias[first + p * LANES + o] : 0);
    }
}

/* The same for many rows: inputs that share one of the four sums pass one after the other, so that a row needs only one
 * register and a value is converted once for all rows. The bits are those of `fp8_strip_of`. */
#define MANY_ROWS (LANES == 8 ? 8 : 16) /* AVX2 has half of the registers */
static __attribute__((noinline)) void fp8_strip_of_many(const Packed *w, long strip, const float *x, long x_stride,
                                                        const float *bias, float *out, long out_stride) {
    const uint8_t *from = w->values + strip * w->inputs * STRIP;
    long first = strip * STRIP, last = w->outputs - first;
    for (int p = 0; p < PARTS; p++) {
        vec total[MANY_ROWS], part[4][MANY_ROWS];
        UNROLL for (int r = 0; r < MANY_ROWS; r++) total[r] = (vec){0};
        for (long start = 0, at = 0; start < w->columns; start += w->scaled, at++) {
            long stop = start + w->scaled < w->columns ? start + w->scaled : w->columns;
            for (int a = 0; a < 4; a++) {
                vec sums[MANY_ROWS];
                UNROLL for (int r = 0; r < MANY_ROWS; r++) sums[r] = (vec){0};
                for (long i = start + a; i < stop; i += 4) {
                    vec v = from_fp8(from + i * STRIP + p * LANES);
                    UNROLL for (int r = 0; r < MANY_ROWS; r++) sums[r] += v * x[r * x_stride + i];
                }
                UNROLL for (int r = 0; r < MANY_ROWS; r++) part[a][r] = sums[r];
            }
            vec scale = fp8_scale(w, strip, at, p * LANES);
            UNROLL for (int r = 0; r < MANY_ROWS; r++)
                total[r] += ((part[0][r] + part[1][r]) + (part[2][r] + part[3][r])) * scale;
        }
        for (int r = 0; r < MANY_ROWS; r++)
            for (long o = 0; o < LANES && p * LANES + o < last; o++)
                out[r * out_stride + first + p * LANES + o] = total[r][o] + (bias ? bias[first + p * LANES + o] : 0);
    }
}

#define ROWS_OF(KIND, R)                                                                                               \
    static __attribute__((noinline)) void strip_##KIND##_##R(const Packed *w, long strip, const Inputs *x,             \
                                                             const float *bias, float *out, long out_stride) {         \
        strip_of(w, strip, x, bias, out, out_stride, KIND, R);                                                         \
    }
#if MOST_ROWS == 8
#define KIND_OF(KIND) ROWS_OF(KIND, 1) ROWS_OF(KIND, 2) ROWS_OF(KIND, 4) ROWS_OF(KIND, 8)
#define CASE(KIND)                                                                                                     \
    case KIND: return rows == 1 ? strip_##KIND##_1 : rows == 2 ? strip_##KIND##_2 : rows == 4 ? strip_##KIND##_4       \
                                                                                              : strip_##KIND##_8;
#else
#define KIND_OF(KIND) ROWS_OF(KIND, 1) ROWS_OF(KIND, 2) ROWS_OF(KIND, 4)
#define CASE(KIND) \
    case KIND: return rows == 1 ? strip_##KIND##_1 : rows == 2 ? strip_##KIND##_2 : strip_##KIND##_4;
#endif
#define EACH_KIND(DO) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K) \
    DO(IQ4_NL) DO(IQ4_XS) DO(MXFP4) DO(INT4) DO(INT4_ZEROS)
EACH_KIND(KIND_OF)

typedef void (*Strip)(const Packed *, long, const Inputs *, const float *, float *, long);

static Strip strips_of(long kind, long rows) {
    switch (kind) {
        EACH_KIND(CASE)
        default: return 0;
    }
}

static __attribute__((noinline)) void fp8_strip(const Packed *w, long strip, const float *x, long x_stride,
                                                const float *bias, float *out, long out_stride, long rows) {
    for (long few; rows > 0; rows -= few, x += few * x_stride, out += few * out_stride) {
        few = rows >= MANY_ROWS ? MANY_ROWS : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
        if (few == MANY_ROWS) fp8_strip_of_many(w, strip, x, x_stride, bias, out, out_stride);
        if (few == 4) fp8_strip_of(w, strip, x, x_stride, bias, out, out_stride, 4);
        if (few == 2) fp8_strip_of(w, strip, x, x_stride, bias, out, out_stride, 2);
        if (few == 1) fp8_strip_of(w, strip, x, x_stride, bias, out, out_stride, 1);
    }
}

static __attribute__((noinline)) void half_strip(const Packed *w, long strip, const float *x, long x_stride,
                                                 const float *bias, float *out, long out_stride, long rows) {
    const int is_brain = w->kind == BF16;
    for (long row = 0, few; row < rows; row += few, x += few * x_stride, out += few * out_stride) {
        few = rows - row >= 4 ? 4 : rows - row >= 2 ? 2 : 1;
        if (few == 4) half_strip_of(w, strip, x, x_stride, bias, out, out_stride, is_brain, 4);
        if (few == 2) half_strip_of(w, strip, x, x_stride, bias, out, out_stride, is_brain, 2);
        if (few == 1) half_strip_of(w, strip, x, x_stride, bias, out, out_stride, is_brain, 1);
    }
}

/* One strip times rows [row, row + count). */
void strip_times(const Packed *w, long strip, const Inputs *x, const float *floats, long floats_stride,
                        const float *bias, float *out, long out_stride, long row, long count) {
    if (takes_floats(w)) {
        (w->kind == FP8 ? fp8_strip : half_strip)(w, strip, floats + row * floats_stride, floats_stride, bias,
                                                  out + row * out_stride, out_stride, count);
        return;
    }
    long groups = w->inputs / GROUP;
    for (long few; count > 0; row += few, count -= few) {
        few = count >= MOST_ROWS ? MOST_ROWS : count >= 4 ? 4 : count >= 2 ? 2 : 1;
        strips_of(w->kind, few)(w, strip, x + row * groups, bias, out + row * out_stride, out_stride);
    }
}

/* -- products ------------------------------------------------------------------------------------------------------------ */

#define BLOCK_ROWS 64 /* their inputs stay in the second-level cache while strips pass */

/* One row into 8 bits, 32 inputs with one scale, as far as the weight has columns; its padding gets zeros. */
void quantize_row(const float *from, Inputs *to, const Packed *w) {
    memset(to + w->columns / GROUP, 0, (w->inputs - w->columns) / GROUP * sizeof(Inputs));
    for (long group = 0; group < w->columns / GROUP; group++, from += GROUP, to++) {
        vec most = {0};
        for (int j = 0; j < GROUP; j += LANES) {
            vec v = LOAD(from + j);
            v = choose(v < (vec){0}, -v, v);
            most = choose(v > most, v, most);
        }
        float largest = 0;
        for (int j = 0; j < LANES; j++) largest = most[j] > largest ? most[j] : largest;
        to->scale = largest / 127;
        float inverse = largest > 0 ? 127 / largest : 0;
        ivec totals[2] = {{0}, {0}};
        UNROLL for (int j = 0; j < GROUP; j += LANES) {
            vec v = LOAD(from + j) * inverse + ROUNDER;
            ivec whole = __builtin_convertvector(v - ROUNDER, ivec);
            *(few_bytes *)(to->values + j) = __builtin_convertvector(whole, few_bytes);
            totals[j / 16] += whole;
        }
        int32_t sums[2] = {0, 0};
        UNROLL for (int j = 0; j < LANES; j++) sums[0] += totals[0][j], sums[1] += totals[1][j];
        to->sums[0] = sums[0] + sums[1], to->sums[1] = sums[0], to->sums[2] = sums[1];
        for (int k = 0; k < 3; k++) to->weighted[k] = to->scale * to->sums[k];
        to->unused = 0;
    }
}

void quantize_rows(const float *x, long x_stride, Inputs *out, long rows, const Packed *w, int threads) {
#pragma omp parallel for num_threads(rows * w->columns < 32768 ? 1 : threads) schedule(static)
    for (long row = 0; row < rows; row++) quantize_row(x + row * x_stride, out + row * (w->inputs / GROUP), w);
}

/* out[rows, outputs of all parts] = x · wᵀ + bias. `x` are the rows in 8 bits, `floats` the rows themselves, which weights
 * in 16 bits take. */
void packed_product(const Packed *parts, long count, const Inputs *x, const float *floats, long floats_stride,
                    const float *bias, float *out, long out_stride, long rows, int threads) {
    long strips = 0, first_strip[9], first_output[9];
    for (long p = 0; p < count; p++) {
        first_strip[p] = strips;
        first_output[p] = p ? first_output[p - 1] + parts[p - 1].outputs : 0;
        strips += (parts[p].outputs + STRIP - 1) / STRIP;
    }
    long blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (long block = 0; block < blocks; block++)
        for (long strip = 0; strip < strips; strip++) {
            long p = count - 1, row = block * BLOCK_ROWS, some = rows - row < BLOCK_ROWS ? rows - row : BLOCK_ROWS;
            while (first_strip[p] > strip) p--;
            strip_times(parts + p, strip - first_strip[p], x, floats, floats_stride, bias ? bias + first_output[p] : 0,
                        out + first_output[p], out_stride, row, some);
        }
}

/* Rows of the weight itself [count, inputs], for a look-up. */
void packed_rows(const Packed *w, const int64_t *which, float *out, long count, int threads) {
    const Form f = form_of(w->kind);
#pragma omp parallel for num_threads(count * w->inputs < 32768 ? 1 : threads) schedule(static)
    for (long i = 0; i < count; i++) {
        long strip = which[i] / STRIP, output = which[i] % STRIP, groups = w->inputs / GROUP;
        float *to = out + i * w->inputs;
        if (w->kind == FP8) {
            const uint8_t *from = w->values + strip * w->inputs * STRIP + output / LANES * LANES;
            for (long k = 0; k < w->columns; k++)
                to[k] = (from_fp8(from + k * STRIP) * fp8_scale(w, strip, k / w->scaled, output / LANES * LANES))[output % LANES];
            continue;
        }
        if (takes_floats(w)) {
            const uint8_t *from = w->values + (strip * w->inputs * STRIP + output / LANES * LANES) * 2;
            for (long k = 0; k < w->inputs; k++)
                to[k] = wide_at(from + k * STRIP * 2, w->kind == BF16)[output % LANES];
            continue;
        }
        const uint8_t *scales = w->scales + strip * strip_scale_bytes(w, &f);
        float scale[SPAN], offset[SPAN];
        int32_t zero[SPAN_GROUPS * STRIP] = {0};
        for (long g = 0; g < groups; g++) {
            long some = groups - g < SPAN_GROUPS ? groups - g : SPAN_GROUPS;
            if (g % SPAN_GROUPS == 0 && f.scales >= WIDE)
                wide_scales_of(w, scales, g, some, scale, zero, f.scales == WIDE_AND_ZERO);
            else if (g % SPAN_GROUPS == 0)
                scales_of(scales, g * GROUP, some * GROUP, scale, offset, f);
            const uint8_t *group = w->values + (strip * groups + g) * group_bytes(&f);
            for (long k = 0; k < GROUP; k++) {
                int value = stored_value(group, &f, output, k);
                long at = (g % SPAN_GROUPS * GROUP + k) / f.scaled * STRIP + output;
                value = f.is_indexed ? table_of(w->kind)[value] : value - f.zero;
                if (f.scales == WIDE_AND_ZERO) value -= zero[at];
                to[g * GROUP + k] = scale[at] * value - (has_offsets(&f) ? offset[at] : 0);
            }
        }
    }
}
