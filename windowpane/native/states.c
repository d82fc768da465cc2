#include <math.h>

#include "kernels.h"
#include "panels.h"

/* -- recurrent states: convolutions, the gated delta rule, Mamba-2's scan -------------------------------------------
 *
 * States are read from one page of a sequence and written to another or to the same. Tokens pass one after another over
 * a part of a state that stays in the first-level cache: as much arithmetic as a chunk's matrix products, and a token has
 * the same bits however its prompt was cut. What a sequence leaves, behind its last row and where a snapshot is wanted
 * before, are its leaves, in the order of rows. Widths are multiples of 16.
 */

#define MOST_TAILS 3
#define UNIT_BYTES 256 /* of a page's offset */
#define TAPS 8         /* at most */
#define SHARES 4       /* of one row's channels, so that a single row has work for several threads */

typedef struct {
    char *tails[MOST_TAILS]; /* of channels × (taps - 1) inputs, oldest first, in a page at offset 0 */
    int64_t tail_channels[MOST_TAILS];
    char *recurrent;
    const int64_t *before, *after; /* [sequences], [leaves]: pages, in units of 256 bytes */
    int64_t before_stride, after_stride;
    const uint8_t *is_new;       /* [sequences]: those begin with zeros, whatever their page holds */
    const int64_t *first_rows;   /* [sequences + 1] */
    const int64_t *first_leaves; /* [sequences + 1] */
    const int64_t *stops;        /* [leaves]: the row behind which each is left */
    int64_t sequences;
} States;

/* Its results lie in blocks of channels, each [rows, block], so that those who read one find its tokens in a row: a first
 * section of `section` channels in blocks of `width`, the rest in blocks of `rest_width`. */
typedef struct {
    const float *x; /* [rows, channels] */
    int64_t x_stride, channels, taps;
    const float *weight, *bias; /* [taps, channels]; [channels], or none */
    int64_t section, width, rest_width;
} Convolution;

INLINE char *page_before(const States *s, char *part, long sequence) {
    return part + s->before[sequence * s->before_stride] * UNIT_BYTES;
}

INLINE char *page_after(const States *s, char *part, long leaf) {
    return part + s->after[leaf * s->after_stride] * UNIT_BYTES;
}

INLINE vec silu(vec x) { return x / (1.0f + exponential(-x)); }

static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

/* To unit length, times `scale`. */
static void to_unit(float *x, long dim, float scale) {
    vec squares = {0};
    for (long i = 0; i < dim; i += LANES) squares += LOAD(x + i) * LOAD(x + i);
    scale /= sqrtf(sum(squares) + 1e-6f);
    for (long i = 0; i < dim; i += LANES) STORE(x + i, LOAD(x + i) * scale);
}

/* The tail of one channel: of a sequence before this step, or of a leaf. */
static float *tail_of(const States *s, long index, long channel, long kept, int is_leaf) {
    int part = 0;
    while (channel >= s->tail_channels[part]) channel -= s->tail_channels[part++];
    char *page = is_leaf ? page_after(s, s->tails[part], index) : page_before(s, s->tails[part], index);
    return (float *)page + channel * kept;
}

static void tail_before(const States *s, const Convolution *c, long sequence, long first, long wide, float *to) {
    for (long i = 0; i < wide; i++) {
        const float *tail = tail_of(s, sequence, first + i, c->taps - 1, 0);
        for (long j = 0; j < c->taps - 1; j++) to[j * wide + i] = s->is_new[sequence] ? 0 : tail[j];
    }
}

INLINE long first_of_block(const Convolution *c, long block) {
    long of_section = c->section / c->width;
    return block < of_section ? block * c->width : c->section + (block - of_section) * c->rest_width;
}

INLINE long blocks_of(const Convolution *c) {
    return c->section / c->width + (c->channels - c->section) / c->rest_width;
}

/* Where the results of a block begin. */
INLINE float *block_at(float *mixed, long first, long rows) { return mixed + first * rows; }

/* The convolution of one block in one row, or its SiLU, from inputs of the rows before it, or of the tail. */
INLINE void convolve(const States *s, const Convolution *c, long sequence, long row, long first, long wide, float *to,
                     float *history, const int is_activated) {
    long kept = c->taps - 1, t = row - s->first_rows[sequence];
    const float *inputs[TAPS];
    if (t < kept) tail_before(s, c, sequence, first, wide, history);
    for (long tap = 0; tap < c->taps; tap++)
        inputs[tap] = t + tap < kept ? history + (t + tap) * wide : c->x + (row - kept + tap) * c->x_stride + first;
    for (long i = 0; i < wide; i += LANES) {
        vec total = LOAD(inputs[0] + i) * LOAD(c->weight + first + i);
        for (long tap = 1; tap < c->taps; tap++)
            total += LOAD(inputs[tap] + i) * LOAD(c->weight + tap * c->channels + first + i);
        if (c->bias) total += LOAD(c->bias + first + i);
        STORE(to + i, is_activated ? silu(total) : total);
    }
}

INLINE long sequence_of(const States *s, long row) {
    long sequence = 0;
    while (s->first_rows[sequence + 1] <= row) sequence++;
    return sequence;
}

/* The last inputs in front of each leaf of one sequence. The last leaf may lie where the sequence is read: from its first
 * input on, each is read before it is overwritten. */
static void keep_tails(const States *s, const Convolution *c, long sequence, long channel) {
    long kept = c->taps - 1;
    const float *from = tail_of(s, sequence, channel, kept, 0);
    for (long leaf = s->first_leaves[sequence]; leaf < s->first_leaves[sequence + 1]; leaf++) {
        long stop = s->stops[leaf], tokens = stop - s->first_rows[sequence];
        float *to = tail_of(s, leaf, channel, kept, 1);
        for (long j = 0; j < kept; j++) {
            long t = tokens - kept + j;
            to[j] = t >= 0 ? c->x[(stop - kept + j) * c->x_stride + channel] : s->is_new[sequence] ? 0 : from[t + kept];
        }
    }
}

/* All rows' blocks, of which the first `unit_blocks` are brought to unit length, the first half of those times `scale`.
 * Called by all threads. */
static void convolve_all(const States *s, const Convolution *c, float *mixed, long rows, long unit_blocks, float scale) {
    long blocks = blocks_of(c), most = c->width > c->rest_width ? c->width : c->rest_width;
    float *history = malloc(4 * TAPS * most);
#pragma omp for collapse(2) schedule(static)
    for (long row = 0; row < rows; row++)
        for (long piece = 0; piece < SHARES; piece++) {
            long sequence = sequence_of(s, row);
            for (long block = blocks * piece / SHARES; block < blocks * (piece + 1) / SHARES; block++) {
                long first = first_of_block(c, block), wide = first < c->section ? c->width : c->rest_width;
                float *to = block_at(mixed, first, rows) + row * wide;
                convolve(s, c, sequence, row, first, wide, to, history, 1);
                if (block < unit_blocks) to_unit(to, wide, 2 * block < unit_blocks ? scale : 1);
            }
        }
#pragma omp for collapse(2) schedule(static) nowait
    for (long sequence = 0; sequence < s->sequences; sequence++)
        for (long channel = 0; channel < c->channels; channel++) keep_tails(s, c, sequence, channel);
    free(history);
}

/* -- the gated delta rule: S ← e^g S; δ = β (v − Sᵀk); S ← S + k δᵀ; o = Sᵀq ------------------------------------- */

typedef struct {
    States states;
    Convolution convolution; /* of q, k and v */
    const float *rates, *steps; /* b and a: [rows, value heads] */
    int64_t rates_stride, steps_stride;
    const float *decay, *dt_bias; /* [value heads] */
    float *out;                   /* [rows, value heads, value dim] */
    float *scratch;               /* [rows, channels + 2 · value heads] */
    int64_t rows, key_heads, value_heads, key_dim, value_dim;
} Delta;

INLINE float dot(const float *a, const float *b, long dim) {
    vec total = {0};
    for (long i = 0; i < dim; i += LANES) total += LOAD(a + i) * LOAD(b + i);
    return sum(total);
}

/* V vectors of columns of one head's state, for all tokens of a sequence. What a token writes is written while the next
 * one reads. */
INLINE void delta_columns(const Delta *d, const float *mixed, const float *factors, long sequence, long head, long column,
                          float *state, const int V) {
    const States *s = &d->states;
    long keys = d->key_dim, values = d->value_dim, at = head * keys * values + column;
    long rows = d->rows, key_head = head / (d->value_heads / d->key_heads), first_value = 2 * d->key_heads * keys;
    const float *queries = mixed + key_head * keys * rows, *all_keys = queries + d->key_heads * keys * rows;
    const float *inputs = mixed + (first_value + head * values + column) * rows;
    const float *from = (float *)page_before(s, s->recurrent, sequence) + at;
    for (long i = 0; i < keys; i++)
        UNROLL for (int v = 0; v < V; v++)
            STORE(state + (i * V + v) * LANES, s->is_new[sequence] ? (vec){0} : LOAD(from + i * values + v * LANES));
    vec learned[2];
    UNROLL for (int v = 0; v < V; v++) learned[v] = (vec){0};
    float decayed = 1;
    const float *written = all_keys + s->first_rows[sequence] * keys; /* the last token's key; of nothing at first */
    long row = s->first_rows[sequence];
    for (long leaf = s->first_leaves[sequence]; leaf < s->first_leaves[sequence + 1]; leaf++) {
        for (; row < s->stops[leaf]; row++) {
            const float *q = queries + row * keys, *k = all_keys + row * keys, *value = inputs + row * V * LANES;
            vec at_key[2][2], at_query[2][2];
            UNROLL for (int v = 0; v < 2 * V; v++) at_key[v % 2][v / 2] = at_query[v % 2][v / 2] = (vec){0};
            for (long i = 0; i < keys; i += 2)
                UNROLL for (int odd = 0; odd < 2; odd++) UNROLL for (int v = 0; v < V; v++) {
                    float *cell = state + ((i + odd) * V + v) * LANES;
                    vec now = LOAD(cell) * decayed + written[i + odd] * learned[v];
                    STORE(cell, now);
                    at_key[odd][v] += now * k[i + odd];
                    at_query[odd][v] += now * q[i + odd];
                }
            float kq = dot(k, q, keys), rate = factors[(head * rows + row) * 2 + 1];
            decayed = factors[(head * rows + row) * 2], written = k;
            UNROLL for (int v = 0; v < V; v++) {
                learned[v] = (LOAD(value + v * LANES) - (at_key[0][v] + at_key[1][v]) * decayed) * rate;
                STORE(d->out + (row * d->value_heads + head) * values + column + v * LANES,
                      (at_query[0][v] + at_query[1][v]) * decayed + learned[v] * kq);
            }
        }
        float *to = (float *)page_after(s, s->recurrent, leaf) + at;
        for (long i = 0; i < keys; i++)
            UNROLL for (int v = 0; v < V; v++)
                STORE(to + i * values + v * LANES, LOAD(state + (i * V + v) * LANES) * decayed + written[i] * learned[v]);
    }
}

static __attribute__((noinline)) void delta_one(const Delta *d, const float *mixed, const float *factors, long sequence,
                                                long head, long column, float *state) {
    delta_columns(d, mixed, factors, sequence, head, column, state, 1);
}

static __attribute__((noinline)) void delta_two(const Delta *d, const float *mixed, const float *factors, long sequence,
                                                long head, long column, float *state) {
    delta_columns(d, mixed, factors, sequence, head, column, state, 2);
}

/* Columns that are computed together. */
long delta_columns_at_once(long value_dim) { return value_dim % (2 * LANES) ? LANES : 2 * LANES; }

void delta_states(const Delta *d, int threads) {
    const States *s = &d->states;
    const Convolution *c = &d->convolution;
    float *mixed = d->scratch, *factors = mixed + d->rows * c->channels;
    long heads = d->value_heads, wide = c->rest_width;
#pragma omp parallel num_threads(threads)
    {
        float *state = aligned_alloc(64, rounded_up(4 * d->key_dim * wide, 64));
#pragma omp for schedule(static) nowait
        for (long i = 0; i < d->rows * heads; i++) {
            long row = i / heads, head = i % heads;
            float *to = factors + (head * d->rows + row) * 2;
            to[0] = expf(-d->decay[head] * softplus(d->steps[row * d->steps_stride + head] + d->dt_bias[head]));
            to[1] = 1 / (1 + expf(-d->rates[row * d->rates_stride + head]));
        }
        convolve_all(s, c, mixed, d->rows, 2 * d->key_heads, 1 / sqrtf(d->key_dim));
#pragma omp for collapse(3) schedule(static)
        for (long sequence = 0; sequence < s->sequences; sequence++)
            for (long head = 0; head < heads; head++)
                for (long column = 0; column < d->value_dim; column += wide)
                    (wide > LANES ? delta_two : delta_one)(d, mixed, factors, sequence, head, column, state);
        free(state);
    }
}

/* -- Mamba-2: S ← e^(−rate · dt) S + dt · x Bᵀ; y = S C + skip · x ----------------------------------------------- */

typedef struct {
    States states;
    Convolution convolution; /* of x, B and C */
    const float *steps;      /* dt: [rows, heads] */
    int64_t steps_stride;
    const float *rates, *dt_bias, *skip; /* [heads] */
    float *out;                          /* [rows, heads, head dim] */
    float *scratch;                      /* [rows, channels + 2 · heads] */
    int64_t rows, heads, groups, head_dim, state_dim;
    float least_step, most_step;
} Scan;

/* LANES rows of one head's state, for all tokens of a sequence. `state` has them transposed: [state dim, LANES]. */
static void scan_rows(const Scan *m, const float *mixed, const float *factors, long sequence, long head, long first,
                      float *state) {
    const States *s = &m->states;
    long wide = m->state_dim, rows = m->rows, at = (head * m->head_dim + first) * wide;
    long inner = m->heads * m->head_dim, group = head / (m->heads / m->groups);
    const float *inputs = mixed + (head * m->head_dim + first) * rows, *writes = mixed + (inner + group * wide) * rows;
    const float *reads = writes + m->groups * wide * rows;
    const float *from = (float *)page_before(s, s->recurrent, sequence) + at;
    if (s->is_new[sequence]) memset(state, 0, 4 * wide * LANES);
    else pack(from, wide, LANES, wide, state, LANES);
    long row = s->first_rows[sequence];
    for (long leaf = s->first_leaves[sequence]; leaf < s->first_leaves[sequence + 1]; leaf++) {
        for (; row < s->stops[leaf]; row++) {
            const float *write = writes + row * wide, *read = reads + row * wide;
            float step = factors[(head * rows + row) * 2], decay = factors[(head * rows + row) * 2 + 1];
            vec x = LOAD(inputs + row * LANES), gained = x * step, y[4];
            UNROLL for (int a = 0; a < 4; a++) y[a] = (vec){0};
            for (long n = 0; n < wide; n += 4)
                UNROLL for (int a = 0; a < 4; a++) {
                    vec now = LOAD(state + (n + a) * LANES) * decay + gained * write[n + a];
                    STORE(state + (n + a) * LANES, now);
                    y[a] += now * read[n + a];
                }
            STORE(m->out + row * inner + head * m->head_dim + first, (y[0] + y[1]) + (y[2] + y[3]) + x * m->skip[head]);
        }
        float *to = (float *)page_after(s, s->recurrent, leaf) + at;
        for (long n = 0; n < wide; n += LANES) {
            vec v[LANES];
            UNROLL for (int l = 0; l < LANES; l++) v[l] = LOAD(state + (n + l) * LANES);
            transpose(v);
            UNROLL for (int l = 0; l < LANES; l++) STORE(to + l * wide + n, v[l]);
        }
    }
}

/* Rows of a state that are computed together. */
long scan_rows_at_once(void) { return LANES; }

void scan_states(const Scan *m, int threads) {
    const States *s = &m->states;
    const Convolution *c = &m->convolution;
    float *mixed = m->scratch, *factors = mixed + m->rows * c->channels;
#pragma omp parallel num_threads(threads)
    {
        float *state = aligned_alloc(64, rounded_up(4 * m->state_dim * LANES, 64));
#pragma omp for schedule(static) nowait
        for (long i = 0; i < m->rows * m->heads; i++) {
            long row = i / m->heads, head = i % m->heads;
            float *to = factors + (head * m->rows + row) * 2;
            float step = softplus(m->steps[row * m->steps_stride + head] + m->dt_bias[head]);
            step = step < m->least_step ? m->least_step : step > m->most_step ? m->most_step : step;
            to[0] = step, to[1] = expf(-m->rates[head] * step);
        }
        convolve_all(s, c, mixed, m->rows, 0, 1);
#pragma omp for collapse(3) schedule(static)
        for (long sequence = 0; sequence < s->sequences; sequence++)
            for (long head = 0; head < m->heads; head++)
                for (long first = 0; first < m->head_dim; first += LANES)
                    scan_rows(m, mixed, factors, sequence, head, first, state);
        free(state);
    }
}

/* -- LFM2's short convolution, of B · x ------------------------------------------------------------------------------ */

typedef struct {
    States states;           /* tails alone */
    Convolution convolution; /* in blocks of one width. Its inputs are made here, [rows, channels]: */
    float *inputs;
    const float *b, *x; /* [rows, channels] */
    int64_t b_stride, x_stride;
    float *out; /* [rows, channels] */
    int64_t rows;
} Short;

void short_states(const Short *m, int threads) {
    const States *s = &m->states;
    const Convolution *c = &m->convolution;
    long channels = c->channels, wide = c->width;
#pragma omp parallel num_threads(threads_for(m->rows * channels, threads))
    {
        float *history = malloc(4 * TAPS * wide);
#pragma omp for schedule(static)
        for (long row = 0; row < m->rows; row++)
            for (long i = 0; i < channels; i += LANES)
                STORE(m->inputs + row * channels + i, LOAD(m->b + row * m->b_stride + i) * LOAD(m->x + row * m->x_stride + i));
#pragma omp for collapse(2) schedule(static)
        for (long row = 0; row < m->rows; row++)
            for (long first = 0; first < channels; first += wide)
                convolve(s, c, sequence_of(s, row), row, first, wide, m->out + row * channels + first, history, 0);
#pragma omp for collapse(2) schedule(static) nowait
        for (long sequence = 0; sequence < s->sequences; sequence++)
            for (long channel = 0; channel < channels; channel++) keep_tails(s, c, sequence, channel);
        free(history);
    }
}

/* -- what is read of a state, normed and gated ------------------------------------------------------------------------ */

/* out = norm(x) · weight · SiLU(gates), or norm(x · SiLU(gates)) · weight where the norm comes last: groups of `dim`,
 * whose weights are `weight_stride` apart. x and out are [rows, groups, dim]. */
void gated_norm(const float *x, const float *gates, long gates_stride, const float *weight, long weight_stride,
                int norms_last, float *out, long rows, long groups, long dim, float eps, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * groups * dim, threads)) schedule(static)
    for (long i = 0; i < rows * groups; i++) {
        const float *from = x + i * dim, *gate = gates + i / groups * gates_stride + i % groups * dim;
        const float *by = weight + i % groups * weight_stride;
        float *to = out + i * dim;
        vec squares = {0};
        for (long j = 0; j < dim; j += LANES) {
            vec v = LOAD(from + j);
            if (norms_last) v *= silu(LOAD(gate + j));
            squares += v * v;
            STORE(to + j, v);
        }
        float scale = 1 / sqrtf(sum(squares) / dim + eps);
        for (long j = 0; j < dim; j += LANES) {
            vec v = LOAD(to + j) * scale * LOAD(by + j);
            if (!norms_last) v *= silu(LOAD(gate + j));
            STORE(to + j, v);
        }
    }
}
