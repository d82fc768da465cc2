#include "packed.h"

/* -- from ggml's blocks to strips ----------------------------------------------------------------------------------------
 *
 * Every type is first taken apart into values of one byte and its scales as they are stored, one row of a span (256
 * inputs, or the fewer that types of 32 end with) at a time. Layouts are those of ggml-common.h.
 */

typedef struct {
    uint8_t values[SPAN];              /* as `stored_value` gives them */
    uint16_t scale[8], offset[8];      /* float16: one per group, or the first for all of the span */
    uint8_t small[16], small_offset[16]; /* relative to those */
} Span;

static uint16_t half_at(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

/* Types of 32 inputs: a scale, perhaps an offset, perhaps fifth bits, then low halves and high halves. */
static void take_32(long kind, const uint8_t *b, uint8_t *values, uint16_t *scale, uint16_t *offset, uint8_t *small) {
    if (kind == MXFP4)
        *small = *b++;
    else
        *scale = half_at(b), b += 2;
    if (kind == Q4_1 || kind == Q5_1) *offset = half_at(b), b += 2;
    if (kind == Q8_0) {
        memcpy(values, b, GROUP);
        return;
    }
    uint32_t fifth = 0;
    if (kind == Q5_0 || kind == Q5_1) memcpy(&fifth, b, 4), b += 4;
    for (int j = 0; j < 16; j++) {
        values[j] = (b[j] & 15) | (fifth >> j & 1) << 4;
        values[j + 16] = b[j] >> 4 | (fifth >> (j + 16) & 1) << 4;
    }
}

/* Q4_K and Q5_K: scales and offsets of six bits, eight each in twelve bytes. */
static void take_six_bits(const uint8_t *b, Span *s) {
    for (int j = 0; j < 4; j++) {
        s->small[j] = b[j] & 63, s->small_offset[j] = b[j + 4] & 63;
        s->small[j + 4] = (b[j + 8] & 15) | b[j] >> 6 << 4, s->small_offset[j + 4] = b[j + 8] >> 4 | b[j + 4] >> 6 << 4;
    }
}

static void take_256(long kind, const uint8_t *b, Span *s) {
    switch (kind) {
        case Q2_K: /* scales, values, scale and offset of all */
            for (int i = 0; i < 16; i++) s->small[i] = b[i] & 15, s->small_offset[i] = b[i] >> 4;
            for (int i = 0; i < SPAN; i++) s->values[i] = b[16 + i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
            s->scale[0] = half_at(b + 80), s->offset[0] = half_at(b + 82);
            break;
        case Q3_K: /* third bits, values, scales of six bits, scale of all */
            for (int i = 0; i < SPAN; i++)
                s->values[i] = (b[32 + i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3) | (b[i % 32] >> i / 32 & 1) << 2;
            for (int i = 0; i < 16; i++) {
                int low = i < 8 ? b[96 + i] & 15 : b[96 + i - 8] >> 4, high = b[104 + i % 4] >> 2 * (i / 4) & 3;
                s->small[i] = (uint8_t)((low | high << 4) - 32);
            }
            s->scale[0] = half_at(b + 108);
            break;
        case Q4_K:
        case Q5_K: { /* scale and offset of all, small ones, (fifth bits,) values */
            const uint8_t *v = b + (kind == Q5_K ? 48 : 16);
            s->scale[0] = half_at(b), s->offset[0] = half_at(b + 2);
            take_six_bits(b + 4, s);
            for (int i = 0; i < SPAN; i++) {
                s->values[i] = v[i / 64 * 32 + i % 32] >> 4 * (i / 32 % 2) & 15;
                if (kind == Q5_K) s->values[i] |= (b[16 + i % 32] >> i / 32 & 1) << 4;
            }
            break;
        }
        case Q6_K: /* low four bits, high two bits, scales, scale of all */
            for (int i = 0; i < SPAN; i++) {
                int half = i / 128, quarter = i / 32 % 4, l = i % 32;
                s->values[i] = (b[half * 64 + quarter % 2 * 32 + l] >> 4 * (quarter / 2) & 15) |
                               (b[128 + half * 32 + l] >> 2 * quarter & 3) << 4;
            }
            memcpy(s->small, b + 192, 16);
            s->scale[0] = half_at(b + 208);
            break;
        default: /* IQ4_XS: scale of all, high bits of scales, low bits of scales, values */
            s->scale[0] = half_at(b);
            for (int g = 0; g < 8; g++) {
                s->small[g] = (uint8_t)(((b[4 + g / 2] >> 4 * (g % 2) & 15) | (half_at(b + 2) >> 2 * g & 3) << 4) - 32);
                for (int j = 0; j < 16; j++) {
                    s->values[g * 32 + j] = b[8 + g * 16 + j] & 15;
                    s->values[g * 32 + 16 + j] = b[8 + g * 16 + j] >> 4;
                }
            }
    }
}

static long bytes_of_32(long kind) {
    switch (kind) {
        case Q4_0:
        case IQ4_NL: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q8_0: return 34;
        case MXFP4: return 17;
        default: return 0;
    }
}

static long bytes_of_256(long kind) {
    return kind == Q2_K ? 84 : kind == Q3_K ? 110 : kind == Q4_K ? 144 : kind == Q5_K ? 176 : kind == Q6_K ? 210 : 136;
}

/* The planes of one group, which are zeroed: four values at a time. */
static void put_values(uint8_t *group, const Form *f, long output, const uint8_t *from) {
    uint32_t *low = (uint32_t *)group + output, *high = low + f->low * STRIP;
    for (int s = 0; s < 8; s++) {
        uint32_t v;
        memcpy(&v, from + 4 * s, 4);
        if (f->low == 8)
            low[s * STRIP] = v;
        else if (f->low == 4)
            low[s % 4 * STRIP] |= (v & 0x0f0f0f0f) << (s < 4 ? 0 : 4);
        else
            low[s / 4 * STRIP] |= (v & 0x03030303) << 2 * (s % 4);
        if (f->high == 1) high[0] |= (v >> f->low & 0x01010101) << s;
        if (f->high == 2) high[s / 4 * STRIP] |= (v >> f->low & 0x03030303) << 2 * (s % 4);
    }
}

static void put_scales(uint8_t *at, const Form *f, long output, const Span *s, long groups) {
    long small = SPAN / f->scaled;
    uint16_t *halves = (uint16_t *)at;
    switch (f->scales) {
        case HALF:
            for (long g = 0; g < groups; g++) halves[g * STRIP + output] = s->scale[g];
            break;
        case HALF_AND_OFFSET:
            for (long g = 0; g < groups; g++) {
                halves[2 * g * STRIP + output] = s->scale[g];
                halves[(2 * g + 1) * STRIP + output] = s->offset[g];
            }
            break;
        case EXPONENT:
            for (long g = 0; g < groups; g++) at[g * STRIP + output] = s->small[g];
            break;
        default: {
            int offsets = f->scales == RELATIVE_AND_OFFSET;
            halves[output] = s->scale[0];
            if (offsets) halves[STRIP + output] = s->offset[0];
            uint8_t *relative = at + STRIP * (offsets ? 4 : 2);
            for (long i = 0; i < small; i++) {
                relative[i * STRIP + output] = s->small[i];
                if (offsets) relative[(small + i) * STRIP + output] = s->small_offset[i];
            }
        }
    }
}

static void repack_strip(const Packed *to, const Form *f, const uint8_t *rows, long row_bytes, long strip) {
    long groups = to->inputs / GROUP, of_32 = bytes_of_32(to->kind), some = to->outputs - strip * STRIP;
    uint8_t *values = (uint8_t *)to->values + strip * groups * group_bytes(f);
    uint8_t *scales = (uint8_t *)to->scales + strip * scale_bytes(f, to->inputs);
    memset(values, 0, groups * group_bytes(f));
    memset(scales, 0, scale_bytes(f, to->inputs));
    for (long o = 0; o < (some < STRIP ? some : STRIP); o++) {
        const uint8_t *row = rows + (strip * STRIP + o) * row_bytes;
        for (long first = 0; first < groups; first += SPAN_GROUPS) {
            long here = groups - first < SPAN_GROUPS ? groups - first : SPAN_GROUPS;
            Span s = {0};
            for (long g = 0; of_32 && g < here; g++, row += of_32)
                take_32(to->kind, row, s.values + g * GROUP, s.scale + g, s.offset + g, s.small + g);
            if (!of_32) take_256(to->kind, row, &s), row += bytes_of_256(to->kind);
            put_scales(scales + scale_bytes(f, first * GROUP), f, o, &s, here);
            for (long g = 0; g < here; g++)
                put_values(values + (first + g) * group_bytes(f), f, o, s.values + g * GROUP);
        }
    }
}

/* Rows as they lie in the file into strips, which are all written. */
void repack(const Packed *to, const uint8_t *rows, long row_bytes, int threads) {
    const Form f = form_of(to->kind);
    long strips = (to->outputs + STRIP - 1) / STRIP;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long strip = 0; strip < strips; strip++) {
        if (to->kind != F16 && to->kind != BF16) {
            repack_strip(to, &f, rows, row_bytes, strip);
            continue;
        }
        uint16_t *halves = (uint16_t *)to->values + strip * to->inputs * STRIP;
        for (long k = 0; k < to->inputs; k++)
            for (long o = 0; o < STRIP; o++) {
                const uint8_t *row = rows + (strip * STRIP + o) * row_bytes;
                halves[k * STRIP + o] = strip * STRIP + o < to->outputs ? half_at(row + 2 * k) : 0;
            }
    }
}

/* -- from the units of models/packing.py ----------------------------------------------------------------------------------
 *
 * Unit j of a block of 128 inputs has the values of inputs j, 32 + j, 64 + j and 96 + j.
 */

typedef struct {
    const uint8_t *units, *scales, *zeros; /* each [outputs, …]; zero points are none where 8 is meant */
    int64_t scales_each;
} Units;

/* Value k of a unit. The bits of MXFP4's codes lie as MXFP4_BITS of models/packing.py says. */
static uint8_t value_of_unit(unsigned u, int k, int is_mxfp4) {
    if (!is_mxfp4) return u >> 4 * k & 15;
    if (k == 3) return (u >> 10 & 1) << 3 | (u >> 13 & 3) << 1 | (u >> 11 & 1);
    return (u >> (15 - 3 * k) & 1) << 3 | (u >> (6 - 3 * k) & 7);
}

static void strip_of_units(const Packed *to, const Form *f, const Units *from, long strip) {
    long blocks = to->inputs / 128, values_bytes = to->inputs * f->low / 8, zero_bytes = (from->scales_each + 7) / 8 * 4;
    uint8_t *values = (uint8_t *)to->values + strip * STRIP * values_bytes;
    uint8_t *scales = (uint8_t *)to->scales + strip * strip_scale_bytes(to, f);
    uint8_t *zeros = scales + from->scales_each * STRIP * 4;
    memset(values, 0, STRIP * values_bytes);
    for (long o = 0; o < STRIP; o++) {
        long output = strip * STRIP + o;
        const uint16_t *units = (const uint16_t *)(from->units + output * values_bytes);
        for (long block = 0; block < blocks; block++, units += GROUP)
            for (int k = 0; k < 4; k++) {
                uint8_t group[GROUP];
                for (int j = 0; j < GROUP; j++) group[j] = value_of_unit(units[j], k, to->kind == MXFP4);
                put_values(values + (block * 4 + k) * group_bytes(f), f, o, group);
            }
        for (long g = 0; g < from->scales_each; g++) {
            if (f->scales == EXPONENT) scales[g * STRIP + o] = from->scales[output * from->scales_each + g];
            else memcpy(scales + (g * STRIP + o) * 4, from->scales + (output * from->scales_each + g) * 4, 4);
        }
        for (long i = 0; f->scales == WIDE_AND_ZERO && i < zero_bytes; i++)
            zeros[i * STRIP + o] = from->zeros[output * zero_bytes + i];
    }
}

/* FP8: scales of whole strips stay as they lie. */
static void fp8_strip_of_units(const Packed *to, const Units *from, long strip) {
    uint8_t *values = (uint8_t *)to->values + strip * STRIP * to->inputs;
    float *scales = (float *)to->scales + strip * STRIP * from->scales_each;
    for (long o = 0; o < STRIP; o++) {
        const uint8_t *units = from->units + (strip * STRIP + o) * to->inputs;
        for (long i = 0; i < to->inputs; i++) values[i * STRIP + o] = units[i / 128 * 128 + i % 32 * 4 + i % 128 / 32];
        for (long g = 0; to->scaled_outputs == 1 && g < from->scales_each; g++)
            scales[g * STRIP + o] = ((const float *)from->scales)[(strip * STRIP + o) * from->scales_each + g];
    }
}

/* Outputs are whole strips. */
void repack_units(const Packed *to, const Units *from, int threads) {
    const Form f = form_of(to->kind);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long strip = 0; strip < to->outputs / STRIP; strip++) {
        if (to->kind == FP8) fp8_strip_of_units(to, from, strip);
        else strip_of_units(to, &f, from, strip);
    }
}

#define CHECKED (1 << 20)

static uint64_t checksum_of(const uint8_t *from, long bytes, uint64_t start) {
    uint64_t lanes[4] = {start, start + 1, start + 2, start + 3}, total = 0;
    long i = 0;
    for (; i + 32 <= bytes; i += 32)
        UNROLL for (int l = 0; l < 4; l++) {
            uint64_t word;
            memcpy(&word, from + i + 8 * l, 8);
            lanes[l] = (lanes[l] ^ word) * 0x9e3779b97f4a7c15u;
            lanes[l] ^= lanes[l] >> 32;
        }
    for (; i < bytes; i++) lanes[0] = (lanes[0] ^ from[i]) * 0x100000001b3u;
    for (int l = 0; l < 4; l++) total = (total ^ lanes[l]) * 0x9e3779b97f4a7c15u;
    return total ^ total >> 29;
}

/* Of bytes on a disk, against damage: a sum over pieces, so that threads share them, each of which knows its place. */
long checksum(const uint8_t *from, long bytes, int threads) {
    long pieces = (bytes + CHECKED - 1) / CHECKED;
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (long i = 0; i < pieces; i++)
        total += checksum_of(from + i * CHECKED, bytes - i * CHECKED < CHECKED ? bytes - i * CHECKED : CHECKED,
                             (uint64_t)(i + 1) * 0xd6e8feb86659fd93u);
    return (long)total;
}
