/* What kernels of different files call of each other. */

#pragma once

#include "stored.h"

/* Waking a thread costs more than a few rows do. */
INLINE int threads_for(long elements, int threads) { return elements < 32768 ? 1 : threads; }

typedef struct {
    Pages pages;                    /* this layer's K and V */
    const int64_t *offsets;         /* [sequences, blocks] of pages, in units of 256 bytes */
    const int64_t *starts, *stops;  /* [sequences]: past positions that count */
    const float *queries;           /* [sequences, query heads, dim] */
    const float *now_keys, *now_values; /* [sequences, KV heads, dim] */
    float *partial;                 /* [sequences, KV heads, parts, query heads of a KV head, dim + 16] */
    float *out;                     /* as queries */
    const float *sinks;             /* [query heads] of logits that take weight and give no value, or none */
    int64_t sequences, blocks, parts, query_heads, kv_heads, dim;
    float scale, softcap; /* a cap of 0 for none */
} Attention;

void attend_decoding(const Attention *a, int threads);
void write_rows(const Pages *p, int part, const int64_t *offsets, const int64_t *within, const float *rows, long stride,
                long count, long heads, long dim, int threads);
void through_format(const float *x, long x_stride, float *out, long rows, long heads, long dim, int which, int threads);
void transform_rows(const float *x, long x_stride, const float *balance, long heads_each, float *out, long rows,
                    long heads, long dim, int threads);
void rms_norm(const float *x, const float *weight, const float *residual, float *out, long rows, long width, float eps,
              int threads);
void heads(const float *x, long x_stride, int normed, const float *weight, const float *cos, const float *sin,
           float *out, long rows, long count, long dim, float eps, int threads);
void gated(const float *gate_up, float *out, long rows, long width, int is_gelu, int threads);
void product_of_few(const float *x, long x_stride, const float *w, const float *bias, float *out, float *packed,
                    long rows, long n, long k, int threads);
void product_block(const float *const *from, long rows, const float *packed, float *out, long out_stride, long first,
                   long last, long k, float *mine);
long product_block_floats(void);
