#include "kernels.h"
#include "packed.h"
#include "panels.h"

/* -- experts: each row visits a few, and gets the sum of their results by its shares ---------------------------------
 *
 * Visits are sorted by expert, so that the rows of one expert stand together and its weights are read once. Then all
 * first products, all activations, all second products and all sums. A row's results are added in the order of the
 * experts, so it has the same bits whatever rows stand beside it.
 */

enum { SILU, GELU, RELU2, CLAMPED }; /* the last: gate · σ(alpha · gate) · (up + 1), both within the limit */

/* The weights [outputs, inputs] of each expert, one below another: panels (see panels.h) or packed strips. */
typedef struct {
    const float *panels;
    const Packed *packed; /* of all experts */
    const Packed *up;     /* the second half of their outputs, where they are stored apart */
    const float *bias;    /* [experts, outputs], or none */
    int64_t outputs, inputs;
} Weights;

typedef struct {
    Weights first, second;
    int64_t experts, first_expert; /* those that are here, of all */
    int64_t activation, weighs_inputs;
    float limit, alpha;
} Experts;

typedef struct {
    const float *x; /* [rows, hidden] */
    const int64_t *ids;
    const float *shares; /* both [rows, chosen] */
    float *out;          /* as x */
    float *scratch;
    int64_t rows, chosen;
} Visits;

/* Rows of one expert that are computed together. */
typedef struct {
    long expert, first, count;
} Work;

#define FEW_VISITS 64       /* below: outputs are cut into small pieces, so that all threads get some */
#define PIECE (4 * NR)      /* of outputs, a multiple of STRIP */
#define LARGE_PIECE (64 * NR)

INLINE int in_8_bits(const Weights *w) { return w->packed && !takes_floats(w->packed); }
INLINE long groups_of(const Weights *w) { return w->packed->inputs / GROUP; }
INLINE long smaller(const Experts *e) { return e->first.outputs / (e->activation == RELU2 ? 1 : 2); }

/* Floats of scratch for so many visits. */
long experts_scratch_floats(const Experts *e, long visits) {
    return visits * (e->first.inputs + e->first.outputs + 2 * smaller(e) + e->second.outputs);
}

INLINE void activate(const Experts *e, const float *made, const float *bias, float *to) {
    long width = smaller(e);
    for (long i = 0; i < width; i += LANES) {
        vec gate = LOAD(made + i);
        if (bias) gate += LOAD(bias + i);
        if (e->activation == RELU2) {
            gate = choose(gate > (vec){0}, gate, (vec){0});
            STORE(to + i, gate * gate);
            continue;
        }
        vec up = LOAD(made + width + i), z = gate;
        if (bias) up += LOAD(bias + width + i);
        if (e->activation == CLAMPED) {
            gate = clamp(gate, -__builtin_inff(), e->limit), up = clamp(up, -e->limit, e->limit) + 1;
            z = gate * e->alpha;
        }
        if (e->activation == GELU) z = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate); /* 2 · √(2/π) */
        STORE(to + i, gate / (1.0f + exponential(-z)) * up);
    }
}

/* Some outputs of one expert for its rows: `from` are the rows of all visits, `quantized` the same in 8 bits, `floats`
 * the same side by side. */
static void multiply_visits(const Weights *w, const Work *work, long first, long last, const float *const *from,
                            const Inputs *quantized, const float *floats, float *out, float *mine) {
    if (w->panels) {
        const float *panels = w->panels + work->expert * rounded_up(w->outputs, NR) * w->inputs;
        product_block(from + work->first, work->count, panels, out + work->first * w->outputs, w->outputs, first, last,
                      w->inputs, mine);
        return;
    }
    long strips = w->outputs / STRIP / (w->up ? 2 : 1), before = work->expert * strips;
    for (long strip = first / STRIP; strip < last / STRIP; strip++) {
        long within = strip % strips;
        strip_times(strip < strips ? w->packed : w->up, before + within, quantized, floats, w->inputs, 0,
                    out + (strip - within - before) * STRIP, w->outputs, work->first, work->count);
    }
}

/* Sorts visits by expert. `order` gets them, `place` where each went or -1, `works` what is computed together. */
static long sort_visits(const Experts *e, const Visits *v, long *order, long *place, Work *works) {
    long visits = v->rows * v->chosen, here = 0, count = 0, *starts = calloc(e->experts + 1, sizeof(long));
    for (long i = 0; i < visits; i++) {
        long expert = v->ids[i] - e->first_expert;
        if (expert >= 0 && expert < e->experts) starts[expert + 1]++;
    }
    for (long expert = 0; expert < e->experts; expert++) {
        starts[expert + 1] += starts[expert];
        for (long at = starts[expert]; at < starts[expert + 1]; at += BLOCK_ROWS)
            works[count++] = (Work){expert, at, least(starts[expert + 1] - at, BLOCK_ROWS)};
    }
    for (long i = 0; i < visits; i++) {
        long expert = v->ids[i] - e->first_expert;
        place[i] = -1;
        if (expert >= 0 && expert < e->experts) order[place[i] = starts[expert]++] = i, here++;
    }
    free(starts);
    order[visits] = here;
    return count;
}

/* out = Σ share · result, in the order of the experts, which is that of the places. */
static void add_up(const Experts *e, const Visits *v, long row, const long *place, const float *results) {
    long hidden = e->second.outputs, sorted[64], count = 0;
    for (long c = 0; c < v->chosen; c++) {
        long visit = row * v->chosen + c, at = count;
        if (place[visit] < 0) continue;
        for (; at > 0 && place[sorted[at - 1]] > place[visit]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = visit, count++;
    }
    for (long i = 0; i < hidden; i += LANES) {
        vec total = {0};
        for (long c = 0; c < count; c++) {
            vec result = LOAD(results + place[sorted[c]] * hidden + i);
            if (e->second.bias)
                result += LOAD(e->second.bias + (v->ids[sorted[c]] - e->first_expert) * hidden + i);
            if (e->weighs_inputs) total += result;
            else total += result * v->shares[sorted[c]];
        }
        STORE(v->out + row * hidden + i, total);
    }
}

/* Widths are multiples of 16, and at most 64 are chosen. */
void run_experts(const Experts *e, const Visits *v, int threads) {
    long visits = v->rows * v->chosen, hidden = e->first.inputs, made = e->first.outputs, width = smaller(e);
    long *order = malloc((2 * visits + 1) * sizeof(long)), *place = order + visits + 1;
    Work *works = malloc((e->experts + visits / BLOCK_ROWS + 1) * sizeof(Work));
    const float **from = malloc(2 * (visits + MR) * sizeof(float *)), **from_middle = from + visits + MR;
    long count = sort_visits(e, v, order, place, works), here = order[visits];
    float *inputs = v->scratch, *first = inputs + visits * hidden, *middle = first + visits * made;
    float *results = middle + visits * width;
    /* Rows in 8 bits take half of what they take as floats. */
    Inputs *quantized = (Inputs *)inputs, *quantized_middle = (Inputs *)(results + visits * e->second.outputs);
    long piece = here < FEW_VISITS ? PIECE : LARGE_PIECE;
    long pieces = (made + piece - 1) / piece, last_pieces = (e->second.outputs + piece - 1) / piece;
#pragma omp parallel num_threads(threads)
    {
        float *mine = aligned_alloc(64, 4 * rounded_up(product_block_floats(), 16));
#pragma omp for schedule(static)
        for (long i = 0; i < here; i++) {
            const float *row = v->x + order[i] / v->chosen * hidden;
            from[i] = row, from_middle[i] = middle + i * width;
            if (e->weighs_inputs) {
                float *weighed = in_8_bits(&e->first) ? results + i * hidden : inputs + i * hidden;
                for (long j = 0; j < hidden; j += LANES) STORE(weighed + j, LOAD(row + j) * v->shares[order[i]]);
                from[i] = row = weighed;
            }
            if (in_8_bits(&e->first)) quantize_row(row, quantized + i * groups_of(&e->first), e->first.packed);
            else if (e->first.packed && !e->weighs_inputs) memcpy(inputs + i * hidden, row, 4 * hidden);
        }
#pragma omp for collapse(2) schedule(dynamic)
        for (long work = 0; work < count; work++)
            for (long p = 0; p < pieces; p++)
                multiply_visits(&e->first, works + work, p * piece, least((p + 1) * piece, made), from, quantized, inputs,
                                first, mine);
#pragma omp for schedule(static)
        for (long i = 0; i < here; i++) {
            const float *bias = e->first.bias ? e->first.bias + (v->ids[order[i]] - e->first_expert) * made : 0;
            activate(e, first + i * made, bias, middle + i * width);
            if (in_8_bits(&e->second))
                quantize_row(middle + i * width, quantized_middle + i * groups_of(&e->second), e->second.packed);
        }
#pragma omp for collapse(2) schedule(dynamic)
        for (long work = 0; work < count; work++)
            for (long p = 0; p < last_pieces; p++)
                multiply_visits(&e->second, works + work, p * piece, least((p + 1) * piece, e->second.outputs),
                                from_middle, quantized_middle, middle, results, mine);
#pragma omp for schedule(static)
        for (long row = 0; row < v->rows; row++) add_up(e, v, row, place, results);
        free(mine);
    }
    free(order), free(works), free(from);
}
