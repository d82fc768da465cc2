#include "kernels.h"
#include "packed.h"

/* -- whole decoder layers for decoding tokens: attention, then a gated MLP -----------------------------------------------
 *
 * The same kernels in the same order as when they are called one by one, so with the same bits.
 */

/* A weight and its bias: plain floats, or packed parts one above the other. */
typedef struct {
    const float *plain, *bias;
    const Packed *parts;
    int64_t count;
} Matrix;

typedef struct {
    /* Norms around either block, head norms and sinks may be missing. */
    const float *before_attention, *q_norm, *k_norm, *after_attention, *before_mlp, *after_mlp, *sinks;
    Matrix qkv, out, gate_up, down;
    Pages pages;          /* its K and V; where they have a basis of their own, with what balances queries and keys */
    const float *balance; /* [queries and keys, KV heads, dim] */
    int64_t hidden, query_heads, kv_heads, dim, mlp;
    int64_t tokens; /* which of those handed over are its own: layers of one group share them */
    int64_t head_norms, v_norm, is_gelu;
    float eps, scale, softcap, multiplier, scalar;
} Layer;

typedef struct {
    const int64_t *offsets, *starts, *stops; /* as in Attention */
    const int64_t *to_offsets, *to_rows;     /* [sequences]: where the new tokens go */
    const float *cos, *sin;                  /* [sequences, dim / 2], or none */
    int64_t sequences, blocks, parts;
    int64_t writes_first; /* some are of the same sequence, and later ones find the earlier ones in pages */
} Tokens;

static long widest(const Layer *l) {
    long a = l->hidden, b = l->query_heads * l->dim;
    a = a > b ? a : b;
    return a > l->mlp ? a : l->mlp;
}

static long scratch_floats(const Layer *l, const Tokens *t) {
    long heads = l->query_heads + 2 * l->kv_heads, query_floats = l->query_heads * l->dim;
    return t->sequences * (2 * l->hidden + widest(l) + 2 * heads * l->dim + query_floats + 3 * l->mlp
                           + l->query_heads * t->parts * (l->dim + 16));
}

/* What `decode_layers` needs. */
long layers_scratch_floats(const Layer *layers, long count, const Tokens *tokens) {
    long most = 0;
    for (const Layer *l = layers; l < layers + count; l++) {
        long floats = scratch_floats(l, tokens + l->tokens);
        most = floats > most ? floats : most;
    }
    return most;
}

/* `packed` has room for the inputs, either way. */
static void times(const Matrix *w, const float *x, float *out, float *packed, long n, long outputs, long inputs,
                  int threads) {
    if (!w->count) {
        product_of_few(x, inputs, w->plain, w->bias, out, packed, n, outputs, inputs, threads);
        return;
    }
    quantize_rows(x, inputs, (Inputs *)packed, n, w->parts, threads);
    packed_product(w->parts, w->count, (Inputs *)packed, x, inputs, w->bias, out, outputs, n, threads);
}

/* What a block reads: the residual stream, normed into `normed` where there is a weight. */
static const float *before(const Layer *l, const float *weight, const float *hidden, float *normed, long n, int threads) {
    if (!weight) return hidden;
    rms_norm(hidden, weight, 0, normed, n, l->hidden, l->eps, threads);
    return normed;
}

/* A block's result, normed where there is a weight, joins the residual stream. */
static void join(const Layer *l, const float *weight, float *mixed, float *hidden, long n, int threads) {
    if (weight && l->multiplier == 1) {
        rms_norm(mixed, weight, hidden, hidden, n, l->hidden, l->eps, threads);
        return;
    }
    if (weight) rms_norm(mixed, weight, 0, mixed, n, l->hidden, l->eps, threads);
    /* Two loops, so that both roundings happen. */
    if (l->multiplier != 1)
        for (long i = 0; i < n * l->hidden; i++) mixed[i] *= l->multiplier;
    for (long i = 0; i < n * l->hidden; i++) hidden[i] += mixed[i];
}

/* Queries, keys and values of n tokens into the basis that they are stored in, keys and values as they are read back. */
static void present(const Layer *l, float *q, float *k, float *v, long n, int threads) {
    long heads = l->query_heads, kv_heads = l->kv_heads, dim = l->dim, kv = kv_heads * dim;
    if (l->balance) {
        transform_rows(q, heads * dim, l->balance, heads / kv_heads, q, n, heads, dim, threads);
        transform_rows(k, kv, l->balance + kv, 1, k, n, kv_heads, dim, threads);
        transform_rows(v, kv, 0, 1, v, n, kv_heads, dim, threads);
    }
    if (l->pages.format == FLOAT32) return;
    through_format(k, kv, k, n, kv_heads, dim, l->pages.format, threads);
    through_format(v, kv, v, n, kv_heads, dim, l->pages.format, threads);
}

static void write(const Layer *l, const Tokens *t, const float *k, const float *v, int threads) {
    long kv = l->kv_heads * l->dim, n = t->sequences;
    write_rows(&l->pages, 0, t->to_offsets, t->to_rows, k, kv, n, l->kv_heads, l->dim, threads);
    write_rows(&l->pages, 1, t->to_offsets, t->to_rows, v, kv, n, l->kv_heads, l->dim, threads);
}

static void decode_layer(const Layer *l, const Tokens *t, float *hidden, float *scratch, int threads) {
    long n = t->sequences, queries = l->query_heads * l->dim, kv = l->kv_heads * l->dim, projected = queries + 2 * kv;
    float *normed = scratch, *mixed = normed + n * l->hidden, *packed = mixed + n * l->hidden;
    float *qkv = packed + n * widest(l), *q = qkv + n * projected, *k = q + n * queries, *v = k + n * kv;
    float *attended = v + n * kv, *both = attended + n * queries, *one = both + 2 * n * l->mlp, *partial = one + n * l->mlp;

    const float *x = before(l, l->before_attention, hidden, normed, n, threads);
    times(&l->qkv, x, qkv, packed, n, projected, l->hidden, threads);
    heads(qkv, projected, l->head_norms, l->q_norm, t->cos, t->sin, q, n, l->query_heads, l->dim, l->eps, threads);
    heads(qkv + queries, projected, l->head_norms, l->k_norm, t->cos, t->sin, k, n, l->kv_heads, l->dim, l->eps,
          threads);
    heads(qkv + queries + kv, projected, l->v_norm, 0, 0, 0, v, n, l->kv_heads, l->dim, l->eps, threads);
    present(l, q, k, v, n, threads);
    if (t->writes_first) write(l, t, k, v, threads);
    Attention a = {l->pages, t->offsets, t->starts, t->stops, q, k, v, partial, attended, l->sinks, n, t->blocks,
                   t->parts, l->query_heads, l->kv_heads, l->dim, l->scale, l->softcap};
    attend_decoding(&a, threads);
    if (l->balance) transform_rows(attended, queries, 0, 1, attended, n, l->query_heads, l->dim, threads);
    if (!t->writes_first) write(l, t, k, v, threads);
    times(&l->out, attended, mixed, packed, n, l->hidden, queries, threads);
    join(l, l->after_attention, mixed, hidden, n, threads);

    x = before(l, l->before_mlp, hidden, normed, n, threads);
    times(&l->gate_up, x, both, packed, n, 2 * l->mlp, l->hidden, threads);
    gated(both, one, n, l->mlp, l->is_gelu, threads);
    times(&l->down, one, mixed, packed, n, l->hidden, l->mlp, threads);
    join(l, l->after_mlp, mixed, hidden, n, threads);
    if (l->scalar != 1)
        for (long i = 0; i < n * l->hidden; i++) hidden[i] *= l->scalar;
}

/* hidden [sequences, hidden] is changed in place. */
void decode_layers(const Layer *layers, long count, const Tokens *tokens, float *hidden, float *scratch, int threads) {
    for (const Layer *l = layers; l < layers + count; l++) decode_layer(l, tokens + l->tokens, hidden, scratch, threads);
}
