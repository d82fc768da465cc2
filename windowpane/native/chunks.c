#include "panels.h"

/* -- attention of a chunk of a prompt ------------------------------------------------------------------------------
 *
 * Query heads that share a KV head are rows of one product, so ROWS rows are a few tokens with all their heads. They
 * pass over blocks of KEYS keys: scores, weights relative to the highest score so far, weighted values. Blocks begin at
 * multiples of KEYS from the sequence's start and what is out of sight weighs nothing, so a token's result has the same
 * bits however its prompt was cut into chunks.
 */

#define ROWS (64 / MR * MR)
#define KEYS (240 / NR * NR)
#define NOTHING (-__builtin_inff())

typedef struct {
    const float *queries;               /* [tokens, query heads, dim] */
    const int64_t *starts, *stops;      /* [tokens], ascending: the positions that a token sees */
    const float *keys, *values;         /* [KV heads, keys, dim], of consecutive positions from first_key on */
    float *packed_keys, *packed_values; /* [KV heads, whole blocks of keys, dim (values: a multiple of NR)] */
    float *out;                         /* as queries */
    const float *sinks;                 /* [query heads] of logits that take weight and give no value, or none */
    int64_t key_head, key_token, value_head, value_token; /* strides in floats */
    int64_t tokens, first_key, num_keys, query_heads, kv_heads, dim;
    float scale, softcap; /* a cap of 0 for none */
} Chunk;

/* How many floats `packed_keys` and `packed_values` need for each KV head and each element of a key or value. */
long chunk_packed_tokens(long first_key, long num_keys) {
    return rounded_up(first_key + num_keys, KEYS) - first_key / KEYS * KEYS;
}

long chunk_packed_dim(long dim) { return rounded_up(dim, NR); }

/* The geometry that all blocks share. */
typedef struct {
    long base, packed, group, wide; /* first packed position, packed positions, query heads per KV head, width of out */
} Shape;

static Shape shape_of(const Chunk *c) {
    return (Shape){c->first_key / KEYS * KEYS, chunk_packed_tokens(c->first_key, c->num_keys),
                   c->query_heads / c->kv_heads, chunk_packed_dim(c->dim)};
}

static float *keys_at(const Chunk *c, const Shape *s, long head, long position) {
    return c->packed_keys + (head * s->packed + position - s->base) * c->dim;
}

static float *values_at(const Chunk *c, const Shape *s, long head, long column, long position) {
    return c->packed_values + head * s->packed * s->wide + column * s->packed + (position - s->base) * NR;
}

/* NR keys as a panel of outputs. */
static void pack_keys(const Chunk *c, const Shape *s, long head, long position) {
    long at = position - c->first_key;
    float *to = keys_at(c, s, head, position);
    const float *from = c->keys + head * c->key_head + at * c->key_token;
    if (at >= 0 && at + NR <= c->num_keys) {
        pack(from, c->key_token, NR, c->dim, to, NR);
        return;
    }
    for (long i = 0; i < c->dim; i++, to += NR)
        for (long n = 0; n < NR; n++)
            to[n] = at + n >= 0 && at + n < c->num_keys ? from[n * c->key_token + i] : 0;
}

/* NR columns of all values as a panel of outputs. */
static void pack_values(const Chunk *c, const Shape *s, long head, long column) {
    float *to = values_at(c, s, head, column, s->base);
    long some = least(c->dim - column, NR);
    for (long at = s->base - c->first_key; at < s->base + s->packed - c->first_key; at++, to += NR) {
        if (some < NR || at < 0 || at >= c->num_keys) memset(to, 0, 4 * NR);
        if (at >= 0 && at < c->num_keys)
            memcpy(to, c->values + head * c->value_head + at * c->value_token + column, 4 * some);
    }
}

/* A row's scores [from, to) become weights, of which [seen_from, seen_to) count. Returns what the row's earlier sums
 * are to be multiplied by. from and to are multiples of NR. */
INLINE float weigh(float *scores, long from, long to, long seen_from, long seen_to, float scale, float softcap,
                   float *highest, float *total) {
    if (softcap) {
        for (long i = from; i < to; i += LANES) STORE(scores + i, soft_capped(LOAD(scores + i) * scale, softcap));
        scale = 1;
    }
    for (long i = from; i < least(seen_from, to); i++) scores[i] = NOTHING;
    for (long i = seen_to > from ? seen_to : from; i < to; i++) scores[i] = NOTHING;
    vec mosts = NOTHING + (vec){0}, sums = {0};
    for (long i = from; i < to; i += LANES) mosts = choose(LOAD(scores + i) > mosts, LOAD(scores + i), mosts);
    float most = *highest;
    UNROLL for (int i = 0; i < LANES; i++) most = mosts[i] * scale > most ? mosts[i] * scale : most;
    if (most == NOTHING) { /* all of it is out of this row's sight */
        memset(scores + from, 0, 4 * (to - from));
        return 1;
    }
    float shrinks = *highest == NOTHING ? 0 : exponential(*highest - most + (vec){0})[0];
    for (long i = from; i < to; i += LANES) {
        vec x = LOAD(scores + i) * scale - most;
        vec weights = choose(x > -87.0f + (vec){0}, exponential(x), (vec){0});
        STORE(scores + i, weights);
        sums += weights;
    }
    *total = *total * shrinks + sum(sums);
    *highest = most;
    return shrinks;
}

/* `count` tokens from `first` on, with all query heads of one KV head. */
static void attend_block(const Chunk *c, const Shape *s, long head, long first, long count, float *scratch) {
    long rows = count * s->group, dim = c->dim, heads = c->query_heads, first_head = head * s->group;
    float *queries = scratch, *scores = queries + ROWS * dim, *weights = scores + ROWS * KEYS;
    float *out = weights + ROWS * KEYS, highest[ROWS], total[ROWS];
    for (long m = 0; m < rows; m += MR)
        for (long i = 0; i < MR; i++) {
            long row = least(m + i, rows - 1); /* rows that are not there repeat the last, and are not asked for */
            const float *from = c->queries + ((first + row / s->group) * heads + first_head + row % s->group) * dim;
            for (long d = 0; d < dim; d++) queries[m * dim + d * MR + i] = from[d];
        }
    for (long r = 0; r < ROWS; r++) {
        highest[r] = c->sinks ? c->sinks[first_head + r % s->group] : NOTHING;
        total[r] = c->sinks ? 1 : 0;
    }
    memset(out, 0, 4 * ROWS * s->wide);
    long low = c->starts[first], high = c->stops[first + count - 1];
    for (long block = low / KEYS * KEYS; block < high; block += KEYS) {
        long from = low > block ? (low - block) / NR * NR : 0, to = least(rounded_up(high - block, NR), KEYS);
        for (long n = from; n < to; n += NR)
            for (long m = 0; m < rows; m += MR)
                tile(queries + m * dim, keys_at(c, s, head, block + n), dim, scores + m * KEYS + n, KEYS, MR, NR, 0);
        for (long r = 0; r < rows; r++) {
            long token = first + r / s->group;
            float shrinks = weigh(scores + r * KEYS, from, to, c->starts[token] - block, c->stops[token] - block,
                                  c->scale, c->softcap, highest + r, total + r);
            if (shrinks != 1)
                for (long i = 0; i < s->wide; i += LANES)
                    STORE(out + r * s->wide + i, LOAD(out + r * s->wide + i) * shrinks);
        }
        for (long m = 0; m < rows; m += MR)
            pack(scores + m * KEYS + from, KEYS, MR, to - from, weights + m * KEYS, MR);
        for (long n = 0; n < s->wide; n += NR)
            for (long m = 0; m < rows; m += MR)
                tile(weights + m * KEYS, values_at(c, s, head, n, block + from), to - from, out + m * s->wide + n,
                     s->wide, MR, NR, 1);
    }
    for (long r = 0; r < rows; r++) {
        float *to = c->out + ((first + r / s->group) * heads + first_head + r % s->group) * dim;
        for (long i = 0; i < dim; i++) to[i] = out[r * s->wide + i] / total[r];
    }
}

/* At most ROWS query heads per KV head. */
void attend_chunk(const Chunk *c, int threads) {
    Shape s = shape_of(c);
    long at_once = ROWS / s.group, blocks = (c->tokens + at_once - 1) / at_once;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = aligned_alloc(64, rounded_up(4 * ROWS * (c->dim + 2 * KEYS + s.wide), 64));
#pragma omp for collapse(2) schedule(static) nowait
        for (long head = 0; head < c->kv_heads; head++)
            for (long at = 0; at < s.packed; at += NR) pack_keys(c, &s, head, s.base + at);
#pragma omp for collapse(2) schedule(static)
        for (long head = 0; head < c->kv_heads; head++)
            for (long column = 0; column < s.wide; column += NR) pack_values(c, &s, head, column);
        /* The last tokens see most, so they go first. */
#pragma omp for collapse(2) schedule(dynamic)
        for (long block = blocks - 1; block >= 0; block--)
            for (long head = 0; head < c->kv_heads; head++)
                attend_block(c, &s, head, block * at_once, least(c->tokens - block * at_once, at_once), scratch);
        free(scratch);
    }
}
