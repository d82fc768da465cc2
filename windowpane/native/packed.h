/* Weights of few bits, as kernels read them, whatever file they come from.
 *
 * Sixteen outputs are a strip. Along its inputs a strip is cut into groups of 32, and a group is 64 bytes for each bit
 * of a value: four neighbouring inputs of all sixteen outputs are one step of 64 bytes, [output, input], and eight steps
 * share bytes:
 *
 *     8 bits    step s is line s
 *     4 bits    line s % 4 holds step s in its low half (s < 4) or its high half
 *     2 bits    line s / 4 holds step s at bits 2 (s % 4)
 *     1 bit     one line holds step s at bit s
 *
 * 3, 5 and 6 bits are 2 + 1, 4 + 1 and 4 + 2. So one load, shift and mask give a vector whose lanes are outputs: a product
 * needs no sums across lanes, and scales are vectors too. Scales of a strip lie apart (see `scales_of`), as exact as
 * they were stored.
 */

#pragma once

#include "vectors.h"

#define STRIP 16
#define GROUP 32
#define SPAN 256 /* inputs whose scales are read together */
#define LINE_BYTES 64
#define SPAN_GROUPS (SPAN / GROUP)

/* ggml's numbers of its types. */
enum { F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
       IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39 };
/* Of other checkpoints: whole numbers of 4 bits around 8, or around a zero point of each scale; floats of 8 bits. */
enum { INT4 = 256, INT4_ZEROS = 257, FP8 = 258 };

/* How scales are stored: one for each group, or small ones relative to one for 256 inputs. WIDE ones are float32, one
 * for each `scaled` inputs of a weight, [scales, 16] of a strip; zero points follow them, [pairs of scales, 16]. */
enum { HALF, HALF_AND_OFFSET, RELATIVE, RELATIVE_AND_OFFSET, EXPONENT, WIDE, WIDE_AND_ZERO };

typedef struct {
    int low, high;  /* bits of a value in its two planes */
    int scaled;     /* inputs that share a scale: 16 or 32 */
    int zero;       /* the stored value that means 0 */
    int scales;     /* how they are stored */
    int is_indexed; /* values are places in a table */
} Form;

/* `inputs` are held, of which `columns` are multiplied: the rest is padding. `scaled` inputs share a WIDE scale, and of
 * FP8 so do `scaled_outputs` outputs: one, or whole strips. */
typedef struct {
    const uint8_t *values, *scales;
    int64_t outputs, inputs, columns, kind, scaled, scaled_outputs;
} Packed;

/* 32 inputs of one row in 8 bits. `sums` and `weighted` (sums × scale) are of all of them and of either half. */
typedef struct {
    int8_t values[GROUP];
    float scale;
    int32_t sums[3];
    float weighted[3];
    int32_t unused;
} Inputs;

static const int8_t IQ4_TABLE[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t MXFP4_TABLE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* doubled */

INLINE Form form_of(long kind) {
    switch (kind) {
        case Q4_0: return (Form){4, 0, 32, 8, HALF, 0};
        case Q4_1: return (Form){4, 0, 32, 0, HALF_AND_OFFSET, 0};
        case Q5_0: return (Form){4, 1, 32, 16, HALF, 0};
        case Q5_1: return (Form){4, 1, 32, 0, HALF_AND_OFFSET, 0};
        case Q8_0: return (Form){8, 0, 32, 0, HALF, 0};
        case Q2_K: return (Form){2, 0, 16, 0, RELATIVE_AND_OFFSET, 0};
        case Q3_K: return (Form){2, 1, 16, 4, RELATIVE, 0};
        case Q4_K: return (Form){4, 0, 32, 0, RELATIVE_AND_OFFSET, 0};
        case Q5_K: return (Form){4, 1, 32, 0, RELATIVE_AND_OFFSET, 0};
        case Q6_K: return (Form){4, 2, 16, 32, RELATIVE, 0};
        case IQ4_NL: return (Form){4, 0, 32, 0, HALF, 1};
        case IQ4_XS: return (Form){4, 0, 32, 0, RELATIVE, 1};
        case INT4: return (Form){4, 0, 32, 8, WIDE, 0};
        case INT4_ZEROS: return (Form){4, 0, 32, 0, WIDE_AND_ZERO, 0};
        default: return (Form){4, 0, 32, 0, EXPONENT, 1}; /* MXFP4 */
    }
}

INLINE int has_offsets(const Form *f) {
    return f->scales == HALF_AND_OFFSET || f->scales == RELATIVE_AND_OFFSET;
}

INLINE const int8_t *table_of(long kind) { return kind == MXFP4 ? MXFP4_TABLE : IQ4_TABLE; }

/* Bytes of a strip's scales for this many inputs; of those that are not WIDE. */
INLINE long scale_bytes(const Form *f, long inputs) {
    long groups = inputs / GROUP, spans = inputs / SPAN, small = SPAN / f->scaled * STRIP;
    switch (f->scales) {
        case HALF: return groups * STRIP * 2;
        case HALF_AND_OFFSET: return groups * STRIP * 4;
        case RELATIVE: return spans * (STRIP * 2 + small);
        case RELATIVE_AND_OFFSET: return spans * (STRIP * 4 + 2 * small);
        default: return groups * STRIP; /* EXPONENT */
    }
}

INLINE long wide_scales(const Packed *w) { return (w->columns + w->scaled - 1) / w->scaled; }

/* Zero points of eight scales are a word of each output. */
INLINE long strip_scale_bytes(const Packed *w, const Form *f) {
    if (f->scales < WIDE) return scale_bytes(f, w->inputs);
    long scales = wide_scales(w), zeros = f->scales == WIDE_AND_ZERO ? (scales + 7) / 8 : 0;
    return (scales + zeros) * STRIP * 4;
}

/* Rows are multiplied as floats, not in 8 bits. */
INLINE int takes_floats(const Packed *w) { return w->kind == F16 || w->kind == BF16 || w->kind == FP8; }

INLINE long group_bytes(const Form *f) { return (f->low + f->high) * LINE_BYTES; }

/* A value as it is stored: output and input count within the group. */
INLINE int stored_value(const uint8_t *group, const Form *f, long output, long input) {
    long step = input / 4, at = output * 4 + input % 4;
    int value;
    if (f->low == 8) return (int8_t)group[step * LINE_BYTES + at];
    if (f->low == 4)
        value = group[step % 4 * LINE_BYTES + at] >> (step < 4 ? 0 : 4) & 15;
    else
        value = group[step / 4 * LINE_BYTES + at] >> 2 * (step % 4) & 3;
    const uint8_t *high = group + f->low * LINE_BYTES;
    if (f->high == 1) value |= (high[at] >> step & 1) << f->low;
    if (f->high == 2) value |= (high[step / 4 * LINE_BYTES + at] >> 2 * (step % 4) & 3) << f->low;
    return value;
}

void quantize_row(const float *from, Inputs *to, const Packed *w);
void quantize_rows(const float *x, long x_stride, Inputs *out, long rows, const Packed *w, int threads);
void packed_product(const Packed *parts, long count, const Inputs *x, const float *rows_as_floats, long floats_stride,
                    const float *bias, float *out, long out_stride, long rows, int threads);
void strip_times(const Packed *w, long strip, const Inputs *x, const float *floats, long floats_stride,
                 const float *bias, float *out, long out_stride, long row, long count);
