#include "kernels.h"

/* -- attention of decoding tokens, straight from pages --------------------------------------------------------------
 *
 * Past tokens are taken in parts of PART, counted from the first that a token can see, so that one long sequence keeps
 * all threads busy and its result depends on nobody else. A part leaves its highest score, the sum of its weights and
 * its weighted values; the parts are then put together. The token itself joins the first part.
 */

#define PART 256
#define SCORES (PART + 16) /* of a head: those of a part and of the token itself, in whole vectors */
#define MOST_HEADS 4 /* query heads of one KV head that are taken together */

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
        UNROLL for (int t = 0; t < T; t++) scores[g * SCORES + t] = sum(total[g][t]) * scale;
}

INLINE void add_values(const float *weights, const float *const *values, long dim, float *out, long out_stride,
                       const int G, const int T) {
    for (long i = 0; i < dim; i += LANES) {
        vec v[4];
        UNROLL for (int t = 0; t < T; t++) v[t] = LOAD(values[t] + i);
        UNROLL for (int g = 0; g < G; g++) {
            vec total = LOAD(out + g * out_stride + i);
            UNROLL for (int t = 0; t < T; t++) total += weights[g * SCORES + t] * v[t];
            STORE(out + g * out_stride + i, total);
        }
    }
}

/* The highest score and the sum of weights end up behind each head's values. */
INLINE void part_of_heads(const float *q, const float *const *keys, const float *const *values, long tokens, long dim,
                          float scale, float softcap, float *out, const int G) {
    float scores[MOST_HEADS * SCORES];
    long t = 0, stride = dim + 16;
    for (; t + 4 <= tokens; t += 4) scores_of(q, keys + t, dim, scale, scores + t, G, 4);
    for (; t < tokens; t++) scores_of(q, keys + t, dim, scale, scores + t, G, 1);
    for (int g = 0; g < G; g++) {
        float *s = scores + g * SCORES, highest = -__builtin_inff(), total = 0;
        for (t = 0; softcap && t < tokens; t += LANES) STORE(s + t, soft_capped(LOAD(s + t), softcap));
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
            case 4: part_of_heads(q, keys, values, tokens, a->dim, a->scale, a->softcap, out, 4); break;
            case 3: part_of_heads(q, keys, values, tokens, a->dim, a->scale, a->softcap, out, 3); break;
            case 2: part_of_heads(q, keys, values, tokens, a->dim, a->scale, a->softcap, out, 2); break;
            default: part_of_heads(q, keys, values, tokens, a->dim, a->scale, a->softcap, out, 1);
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
    const float *sink = a->sinks ? a->sinks + query_head : 0;
    const float *partial = a->partial + ((sequence * a->kv_heads + head) * a->parts * group + query_head % group) * stride;
    float *out = a->out + (sequence * a->query_heads + query_head) * a->dim;
    float highest = sink ? *sink : -__builtin_inff();
    for (long p = 0; p < parts; p++) {
        float of_part = partial[p * group * stride + a->dim];
        highest = of_part > highest ? of_part : highest;
    }
    float total = sink ? exponential(*sink - highest + (vec){0})[0] : 0;
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
