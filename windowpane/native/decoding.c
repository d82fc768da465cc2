#include "kernels.h"
#include "panels.h"

/* -- attention of decoding tokens, straight from pages --------------------------------------------------------------
 *
 * Past tokens are taken in parts of PART, counted from the first that a token can see, so that one long sequence keeps
 * all threads busy and its result depends on nobody else. A part leaves its highest score, the sum of its weights and
 * its weighted values; the parts are then put together. The token itself joins the first part.
 */

#define PART 256
#define SCORES (PART + 16) /* of a head: those of a part and of the token itself, in whole vectors */
#define MOST_HEADS 4 /* query heads of one KV head that are taken together */

/* Of some tokens: rows in pages, and scales where the format is int8; or the row of the token itself. */
typedef struct {
    const char *const *rows;
    const float *scales;
} Rows;

/* The sum of each of 16 vectors' lanes, first to last as `sum` has it: lanes become vectors, which are added. */
INLINE void sums_of(vec *v, float *sums) {
    UNROLL for (int at = 0; at < 16; at += LANES) {
#if LANES == 4
        UNROLL for (int i = 0; i < LANES; i++) sums[at + i] = sum(v[at + i]);
#else
        transpose(v + at);
        vec total = {0};
        UNROLL for (int lane = 0; lane < LANES; lane++) total += v[at + lane];
        STORE(sums + at, total);
#endif
    }
}

INLINE void scores_of(const float *q, Rows keys, long t0, long dim, float scale, float *scores, const int format,
                      const int G, const int T) {
    vec total[MOST_HEADS][4];
    float sums[MOST_HEADS][4];
    UNROLL for (int g = 0; g < MOST_HEADS; g++) UNROLL for (int t = 0; t < 4; t++) total[g][t] = (vec){0};
    long wide = dim / PIECES(format);
    for (int piece = 0; piece < PIECES(format); piece++)
        for (long i = 0; i < wide; i += LANES)
            UNROLL for (int t = 0; t < T; t++) {
                vec k = load_stored(keys.rows[t0 + t], i, piece, format);
                UNROLL for (int g = 0; g < G; g++) total[g][t] += k * LOAD(q + g * dim + piece * wide + i);
            }
    if (G * T > LANES / 2)
        sums_of(total[0], sums[0]);
    else
        UNROLL for (int g = 0; g < G; g++) UNROLL for (int t = 0; t < T; t++) sums[g][t] = sum(total[g][t]);
    UNROLL for (int g = 0; g < G; g++)
        UNROLL for (int t = 0; t < T; t++) {
            float score = sums[g][t];
            if (format == INT8) score *= keys.scales[t0 + t];
            scores[g * SCORES + t0 + t] = score * scale;
        }
}

INLINE void add_values(const float *weights, Rows values, long t0, long dim, float *out, long out_stride,
                       const int format, const int G, const int T) {
    float w[MOST_HEADS][4];
    UNROLL for (int g = 0; g < G; g++)
        UNROLL for (int t = 0; t < T; t++) {
            w[g][t] = weights[g * SCORES + t0 + t];
            if (format == INT8) w[g][t] *= values.scales[t0 + t];
        }
    long wide = dim / PIECES(format);
    for (int piece = 0; piece < PIECES(format); piece++)
        for (long i = 0; i < wide; i += LANES) {
            vec v[4];
            UNROLL for (int t = 0; t < T; t++) v[t] = load_stored(values.rows[t0 + t], i, piece, format);
            UNROLL for (int g = 0; g < G; g++) {
                float *to = out + g * out_stride + piece * wide + i;
                vec total = LOAD(to);
                UNROLL for (int t = 0; t < T; t++) total += w[g][t] * v[t];
                STORE(to, total);
            }
        }
}

/* One head's scores become weights relative to the highest, which ends up in `out` with their sum. */
static __attribute__((noinline)) void weigh(float *s, long tokens, float softcap, float *out) {
    float highest = -__builtin_inff();
    vec highs = -__builtin_inff() + (vec){0}, totals = {0};
    for (long t = tokens; t % LANES; t++) s[t] = -__builtin_inff();
    for (long t = 0; t < tokens; t += LANES) {
        vec scores = LOAD(s + t);
        if (softcap) STORE(s + t, scores = soft_capped(scores, softcap));
        highs = choose(scores > highs, scores, highs);
    }
    for (int i = 0; i < LANES; i++) highest = highs[i] > highest ? highs[i] : highest;
    for (long t = 0; t < tokens; t += LANES) STORE(s + t, exponential(LOAD(s + t) - highest));
    for (long t = tokens; t % LANES; t++) s[t] = 0;
    for (long t = 0; t < tokens; t += LANES) totals += LOAD(s + t);
    out[0] = highest;
    out[1] = sum(totals);
}

/* Four rows that are read soon: pages lie apart, and hardware fetches ahead only within one. */
INLINE void fetch_ahead(Rows from, long t, long past, long row_bytes) {
    long next = t + (row_bytes < 512 ? 16 : 8);
    for (long r = next; r < next + 4 && r < past; r++)
        for (long at = 0; at < row_bytes; at += 64) __builtin_prefetch(from.rows[r] + at);
}

/* `past` tokens from pages, in fours: rows that are not there repeat the last and weigh nothing. Where `now` is 1, the
 * token itself follows them. The highest score and the sum of weights end up behind each head's values. */
INLINE void part_of_heads(const Attention *a, const float *q, Rows keys, Rows values, long past, long now, float *out,
                          const int format, const int G) {
    float scores[MOST_HEADS * SCORES], own[MOST_HEADS * SCORES];
    long t, dim = a->dim, stride = dim + 16, tokens = past + now;
    for (t = 0; t < past; t += 4) {
        fetch_ahead(keys, t, past, a->pages.row_bytes);
        scores_of(q, keys, t, dim, a->scale, scores, format, G, 4);
    }
    if (now) scores_of(q, keys, PART, dim, a->scale, own, FLOAT32, G, 1);
    for (int g = 0; g < G; g++) {
        float *s = scores + g * SCORES;
        if (now) s[past] = own[g * SCORES + PART];
        weigh(s, tokens, a->softcap, out + g * stride + dim);
        memset(out + g * stride, 0, 4 * dim);
        own[g * SCORES + PART] = s[past];
        for (t = past; t % 4; t++) s[t] = 0;
    }
    for (t = 0; t < past; t += 4) {
        fetch_ahead(values, t, past, a->pages.row_bytes);
        add_values(scores, values, t, dim, out, stride, format, G, 4);
    }
    if (now) add_values(own, values, PART, dim, out, stride, FLOAT32, G, 1);
}

/* All query heads of a KV head, a few at a time. */
INLINE void part_of_group(const Attention *a, const float *q, Rows keys, Rows values, long past, long now, float *out,
                          const int format) {
    long group = a->query_heads / a->kv_heads, stride = a->dim + 16;
    for (long g = 0, few; g < group; g += few, q += few * a->dim, out += few * stride) {
        few = group - g < MOST_HEADS ? group - g : MOST_HEADS;
        switch (few) {
            case 4: part_of_heads(a, q, keys, values, past, now, out, format, 4); break;
            case 3: part_of_heads(a, q, keys, values, past, now, out, format, 3); break;
            case 2: part_of_heads(a, q, keys, values, past, now, out, format, 2); break;
            default: part_of_heads(a, q, keys, values, past, now, out, format, 1);
        }
    }
}

static void one_part(const Attention *a, long sequence, long head, long part) {
    const Pages *p = &a->pages;
    const char *keys[PART + 1], *values[PART + 1];
    float key_scales[PART], value_scales[PART];
    long first_block = a->starts[sequence] / p->block_tokens, tokens = 0;
    long from = a->starts[sequence] + part * PART, to = from + PART;
    if (to > a->stops[sequence]) to = a->stops[sequence];
    const int64_t *offset = a->offsets + sequence * a->blocks + from / p->block_tokens - first_block;
    for (long at = from, within = from % p->block_tokens; at < to; at++, tokens++, within++) {
        if (within == p->block_tokens) within = 0, offset++;
        int64_t page = *offset * 256;
        long row = head * p->block_tokens + within;
        keys[tokens] = p->rows[0] + page + row * p->row_bytes;
        values[tokens] = p->rows[1] + page + row * p->row_bytes;
        if (p->format != INT8) continue;
        memcpy(key_scales + tokens, p->scales[0] + page + row * 4, 4);
        memcpy(value_scales + tokens, p->scales[1] + page + row * 4, 4);
    }
    for (long t = tokens; t % 4; t++) {
        keys[t] = keys[tokens - 1], values[t] = values[tokens - 1];
        key_scales[t] = value_scales[t] = 0;
    }
    keys[PART] = (const char *)(a->now_keys + (sequence * a->kv_heads + head) * a->dim);
    values[PART] = (const char *)(a->now_values + (sequence * a->kv_heads + head) * a->dim);
    long group = a->query_heads / a->kv_heads;
    const float *q = a->queries + (sequence * a->query_heads + head * group) * a->dim;
    float *out = a->partial + ((sequence * a->kv_heads + head) * a->parts + part) * group * (a->dim + 16);
    BY_FORMAT(p->format, part_of_group(a, q, (Rows){keys, key_scales}, (Rows){values, value_scales}, tokens,
                                       part == 0, out, format));
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
