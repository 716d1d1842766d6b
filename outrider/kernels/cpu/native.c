/* Small float32 operations of a step on the CPU (norms, activations, rope with cache write) and a whole decoder layer
 * made of them, of products (product.c) and of attention (attention.c). Knows pointers, sizes and
 * strides; shapes and types are checked in Python and the meaning of each function is its twin in reference.py.
 */
#include "native.h"

/* ---- norms and activations ---- */

void norm_row(const float *x, float *residual, const float *weight, float *out, int64_t width, float eps) {
    vf total = {0};
    int64_t i = 0;
    float rest = 0;
    const float *from = residual ? residual : x;
    if (residual) {
        for (; i + VL <= width; i += VL) store(residual + i, load(residual + i) + load(x + i));
        for (; i < width; i++) residual[i] += x[i];
    }
    for (i = 0; i + VL <= width; i += VL) total = fused(load(from + i), load(from + i), total);
    for (; i < width; i++) rest += from[i] * from[i];
    float scale = 1.0f / sqrtf((sum_lanes(total) + rest) / (float)width + eps);
    for (i = 0; i + VL <= width; i += VL) store(out + i, load(from + i) * scale * load(weight + i));
    for (; i < width; i++) out[i] = from[i] * scale * weight[i];
}

void share_norm(const float *x, int64_t x_stride, float *residual, int64_t residual_stride, const float *weight,
                float *out, int64_t tokens, int64_t width, float eps, Team *team) {
#pragma omp for nowait
    for (int64_t t = 0; t < tokens; t++)
        norm_row(x + t * x_stride, residual ? residual + t * residual_stride : NULL, weight, out + t * width, width,
                 eps);
    meet(team);
}

void rms_norm(const float *x, int64_t x_stride, float *residual, int64_t residual_stride, const float *weight,
              float *out, int64_t tokens, int64_t width, float eps, int threads) {
    if (tokens * width < 65536) threads = 1;
    Team team = {.threads = threads};
    PARALLEL(threads) share_norm(x, x_stride, residual, residual_stride, weight, out, tokens, width, eps, &team);
}

static void share_gates(const Gates *gates, const float *gate_up, int64_t stride, int64_t tokens, Team *team) {
#pragma omp for nowait
    for (int64_t t = 0; t < tokens; t++) apply_gates(gates, gate_up, stride, t, t + 1, 0, gates->width);
    meet(team);
}

void gated(const float *gate_up, int64_t stride, float *out, int64_t tokens, int64_t width, int gelu, int threads) {
    if (tokens * width < 16384) threads = 1;
    const Gates gates = {out, width, gelu};
    Team team = {.threads = threads};
    PARALLEL(threads) share_gates(&gates, gate_up, stride, tokens, &team);
}

/* Functions of single elements. The result of an element does not depend on its place: a library computes the last
 * elements of a tensor, or of a thread's part of it, by other code than those before them. */
enum { SIGMOID_SCALE, GELU_SCALE, CAP };

/* By a series near 0, where the quotient would lose all digits. */
INLINE vf vtanh(vf x) {
    vf size = pick(x < 0.0f, -x, x), square = x * x;
    vf series = splat(62.0f / 2835.0f);
    series = fused(series, square, splat(-17.0f / 315.0f));
    series = fused(series, square, splat(2.0f / 15.0f));
    series = fused(series, square, splat(-1.0f / 3.0f));
    series = fused(series * square, x, x);
    vf shrunk = vexp(-2.0f * size), quotient = (1.0f - shrunk) / (1.0f + shrunk);
    return pick(size < 0.25f, series, pick(x < 0.0f, -quotient, quotient));
}

INLINE vf element(vf x, vf y, float cap, const int kind) {
    if (kind == SIGMOID_SCALE) return x / (1.0f + vexp(-y));
    if (kind == GELU_SCALE) return activate(x, 1) * y;
    return cap * vtanh(x / cap);
}

/* `one`: the whole row has one y. */
INLINE void element_row(const float *x, const float *y, int one, float *out, int64_t width, float cap, const int kind) {
    vf same = splat(*y);
    int64_t i = 0;
    for (; i + VL <= width; i += VL) store(out + i, element(load(x + i), one ? same : load(y + i), cap, kind));
    if (i < width) {
        int n = (int)(width - i);
        vf tail = element(load_tail(x + i, n), one ? same : load_tail(y + i, n), cap, kind);
        for (int j = 0; j < n; j++) out[i + j] = tail[j];
    }
}

/* Rows of x and y at their strides, those of out side by side; y has `width` columns, or one. */
void elements(const float *x, int64_t x_stride, const float *y, int64_t y_stride, int64_t y_width, float *out,
              int64_t rows, int64_t width, float cap, int kind, int threads) {
    int one = y_width == 1;
    if (rows * width < 16384) threads = 1;
#pragma omp parallel for num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *a = x + r * x_stride, *b = y + r * y_stride;
        switch (kind) {
        case SIGMOID_SCALE: element_row(a, b, one, out + r * width, width, cap, SIGMOID_SCALE); break;
        case GELU_SCALE: element_row(a, b, one, out + r * width, width, cap, GELU_SCALE); break;
        case CAP: element_row(a, b, one, out + r * width, width, cap, CAP); break;
        }
    }
}

/* ---- rope and cache write ---- */

static void rotate_head(float *x, const float *cosine, const float *sine, int64_t half, int64_t second) {
    int64_t i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = load(x + i), b = load(x + half + i);
        store(x + i, a * load(cosine + i) - b * load(sine + i));
        store(x + half + i, b * load(cosine + second + i) + a * load(sine + second + i));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[second + i] + a * sine[second + i];
    }
}

static int is_finite(const float *x, int64_t count) {
    vf rest = {0}; /* NaN where something is not finite: inf x 0 is NaN */
    float last = 0;
    int64_t i = 0;
    for (; i + VL <= count; i += VL) rest += load(x + i) * splat(0.0f);
    for (; i < count; i++) last += x[i] * 0.0f;
    return sum_lanes(rest) + last == 0.0f;
}

/* Keys and values of one token. See contain_non_finite in reference.py. */
static void write_token(float *to_k, float *to_v, const float *k, const float *v, int64_t count) {
    if (is_finite(k, count) && is_finite(v, count)) {
        memcpy(to_k, k, count * sizeof(float));
        memcpy(to_v, v, count * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        to_k[i] = NAN;
        to_v[i] = 0;
    }
}

static void rope_write_row(float *row, int64_t position, int64_t slot, const Rope *r) {
    float *k = row + r->heads * r->cache.dim, *v = k + r->cache.kv_heads * r->cache.dim;
    const float *cosine = r->cos + position * r->cos_stride, *sine = r->sin + position * r->sin_stride;
    for (int64_t h = 0; h < r->heads + r->cache.kv_heads; h++) {
        float *head = row + h * r->cache.dim;
        const float *weight = h < r->heads ? r->q_norm : r->k_norm;
        if (weight) norm_row(head, NULL, weight, head, r->cache.dim, r->eps);
        rotate_head(head, cosine, sine, r->rotary / 2, r->second);
    }
    if (slot < 0) return;
    int64_t page = slot / r->cache.page_size, offset = (slot % r->cache.page_size) * r->cache.kv_heads * r->cache.dim;
    write_token(r->cache.k + page * r->cache.k_stride + offset, r->cache.v + page * r->cache.v_stride + offset, k, v,
                r->cache.kv_heads * r->cache.dim);
}

void share_rope_write(float *qkv, int64_t stride, int64_t tokens, const Rope *r, int64_t *bad, Team *team) {
#pragma omp for nowait
    for (int64_t t = 0; t < tokens; t++) {
        int64_t position = r->positions[t], slot = r->slots[t];
        if (position < 0 || position >= r->max_len || slot >= r->cache.num_pages * r->cache.page_size) {
#pragma omp atomic
            *bad += 1;
            continue;
        }
        rope_write_row(qkv + t * stride, position, slot, r);
    }
    meet(team);
}

/* Returns the number of tokens out of range. */
int64_t rope_write(float *qkv, int64_t stride, int64_t tokens, const Rope *r, int threads) {
    int64_t bad = 0;
    if (tokens * (r->heads + r->cache.kv_heads) * r->cache.dim < 16384) threads = 1;
    Team team = {.threads = threads};
    PARALLEL(threads) share_rope_write(qkv, stride, tokens, r, &bad, &team);
    return bad;
}

/* ---- a decoder layer ---- */

static _Thread_local void *kept_layer;
static _Thread_local size_t layer_size;

static Rope layer_rope(const BoundLayer *b, const LayerStep *s) {
    return (Rope){.cache = b->cache, .heads = b->heads, .q_norm = b->q_norm, .k_norm = b->k_norm, .eps = b->norm_eps,
                  .positions = s->positions, .slots = s->slots, .cos = s->cos, .sin = s->sin, .max_len = s->max_len,
                  .cos_stride = s->cos_stride, .sin_stride = s->sin_stride, .rotary = s->rotary, .second = 0};
}

static Attention layer_attention(const BoundLayer *b, const LayerStep *s, const float *q, float *out) {
    return (Attention){.requests = s->requests, .tokens = s->tokens, .cache = b->cache, .heads = b->heads,
                       .window = b->window, .scale = b->scale, .softcap = b->softcap, .q = q, .out = out,
                       .q_stride = b->weights.qkv.outputs, .chunked = b->chunked};
}

/* What the threads share of a step: the batch, the numbers between operations, and what went wrong. */
typedef struct {
    const LayerStep *step;
    const Adapters *adapters; /* or null */
    int64_t num_segments;     /* of the adapters' rows */
    float *delta, *residual; /* [tokens, hidden] */
    float *x, *spread, *gathered; /* behind a norm; what a product leaves, and takes */
    float *inner;                 /* products with the first factors of adapters */
    Rope rope;
    Attention attention;
    AttentionWork work;
    int64_t bad, failed, error;
} Pass;

static int64_t wider(int64_t a, int64_t b) { return a > b ? a : b; }

/* Memory for the numbers between operations, for the widest of the layers. Returns 0 if there is none. */
static int find_memory(Pass *p, const BoundLayer *layers, const LayerTargets *targets, int64_t count) {
    int64_t tokens = p->step->tokens, wide = 0, narrow = 0, hidden = 0, most = 0;
    for (int64_t i = 0; i < count; i++) {
        const Layer *l = &layers[i].weights;
        hidden = l->qkv.inputs;
        wide = wider(wide, wider(l->qkv.outputs, 2 * l->down.inputs));
        narrow = wider(narrow, wider(l->out.inputs, l->down.inputs));
        if (!p->adapters) continue;
        const LayerTargets *own = targets + i;
        most = wider(wider(most, wider(own->qkv.count, own->out.count)), wider(own->gate_up.count, own->down.count));
    }
    const int64_t ranks = p->adapters ? most * p->adapters->max_rank : 0;
    p->x = kept(&kept_layer, &layer_size, tokens * (hidden + wide + narrow + ranks) * sizeof(float));
    p->spread = p->x + tokens * hidden, p->gathered = p->spread + tokens * wide;
    p->inner = p->gathered + tokens * narrow;
    return p->x != NULL;
}

/* One thread prepares a layer for all. */
static void prepare_layer(Pass *p, const BoundLayer *b, int threads) {
    p->rope = layer_rope(b, p->step);
    p->attention = layer_attention(b, p->step, p->spread, p->gathered);
    p->error = list_attention(&p->attention, threads, &p->work);
}

/* A product and what adapters add to it, if they have `targets`, which may be null. */
static void share_changed(const Pass *p, const Matrix *w, const float *x, float *y, const Gates *gates,
                          const Targets *targets, Team *team) {
    const int64_t tokens = p->step->tokens;
    if (!targets || !targets->count) {
        share_product(w, x, w->inputs, y, tokens, gates, team);
        return;
    }
    const Change change = {p->adapters, *targets, p->num_segments, p->inner, 0};
    share_reduce(&change, x, w->inputs, w->inputs, team);
    share_product(w, x, w->inputs, y, tokens, NULL, team);
    share_add(&change, y, w->outputs, w->outputs, team);
    if (gates) share_gates(gates, y, w->outputs, tokens, team);
}

/* `next` is the layer behind, or null: one thread prepares it as soon as the attention of this one is done, when what
 * was prepared for this one is no longer read. `targets`: of adapters, or null. `aux_state`: see `decoder_layers`. */
static void share_layer(Pass *p, const BoundLayer *bound, const BoundLayer *next, const LayerTargets *targets,
                        int has_delta, float *aux_state, Team *team) {
    const Layer *l = &bound->weights;
    int64_t tokens = p->step->tokens, hidden = l->qkv.inputs, inner = l->down.inputs;
    if (has_delta)
        share_norm(p->delta, hidden, p->residual, hidden, l->input_norm, p->x, tokens, hidden, l->eps, team);
    else
        share_norm(p->residual, hidden, NULL, 0, l->input_norm, p->x, tokens, hidden, l->eps, team);
    if (aux_state) { /* the stream changes again behind the attention only */
#pragma omp for nowait
        for (int64_t t = 0; t < tokens; t++)
            memcpy(aux_state + t * hidden, p->residual + t * hidden, hidden * sizeof(float));
    }
    share_changed(p, &l->qkv, p->x, p->spread, NULL, targets ? &targets->qkv : NULL, team);
    share_rope_write(p->spread, l->qkv.outputs, tokens, &p->rope, &p->bad, team);
    share_attention(&p->work, &p->failed, team);
#pragma omp master
    if (next) prepare_layer(p, next, team->threads);
    share_changed(p, &l->out, p->gathered, p->delta, NULL, targets ? &targets->out : NULL, team);
    share_norm(p->delta, hidden, p->residual, hidden, l->mlp_norm, p->x, tokens, hidden, l->eps, team);
    share_changed(p, &l->gate_up, p->x, p->spread, &(Gates){p->gathered, inner, l->gelu},
                  targets ? &targets->gate_up : NULL, team);
    share_changed(p, &l->down, p->gathered, p->delta, NULL, targets ? &targets->down : NULL, team);
}

/* For each layer in turn: residual += delta, then attention and MLP of it, each behind its norm; what the MLP adds is
 * left in delta. Without `has_delta` nothing is added before the first layer. `adapters`: of the step's token rows, with
 * the targets of each layer; or null. `aux_states`, or null: of each layer, where a copy of the residual stream before it
 * goes, or null.
 * Returns 0, minus the number of tokens whose position or slot is out of range, or an error of the attention.
 * All threads look at errors between two meetings within which no thread writes them, so they leave together. */
int64_t decoder_layers(const BoundLayer *layers, int64_t count, const LayerStep *s, const Adapters *adapters,
                       const LayerTargets *targets, float *delta, int has_delta, float *residual, float *const *aux_states,
                       int threads) {
    Pass pass = {.step = s, .delta = delta, .residual = residual, .adapters = adapters};
    Team team = {.threads = threads};
    if (adapters) pass.num_segments = count_segments(adapters);
    if (!find_memory(&pass, layers, targets, count)) return 3;
    prepare_layer(&pass, layers, threads);
    PARALLEL(threads) for (int64_t i = 0; i < count && !pass.error; i++) {
        share_layer(&pass, layers + i, i + 1 < count ? layers + i + 1 : NULL, adapters ? targets + i : NULL,
                    has_delta || i > 0, aux_states ? aux_states[i] : NULL, &team);
        if (pass.bad || pass.failed) break;
    }
    return pass.error ? pass.error : pass.bad ? -pass.bad : pass.failed ? 2 : 0;
}

/* How many tokens up to `at` equal the last ones of the text, at most `most`. */
static int64_t equal_before(const int64_t *text, int64_t last, int64_t at, int64_t most) {
    int64_t n = 0;
    while (n < most && n <= at && text[at - n] == text[last - n]) n++;
    return n;
}

/* What followed the last time a row's text ended like this: of the longest suffix, the latest occurrence. */
void find_ngram(const int64_t *tokens, int64_t stride, const int64_t *known, const int64_t *rows, int64_t requests,
                int64_t width, int64_t most, int64_t min_n, int64_t max_n, int64_t *drafts, int64_t *counts) {
    for (int64_t request = 0; request < requests; request++) {
        const int64_t *text = tokens + rows[request] * stride;
        int64_t length = known[rows[request]], longest = min_n - 1, found = -1;
        if (length > width) length = width;
        for (int64_t at = length - 2; at >= 0 && longest < max_n; at--) {
            int64_t n = equal_before(text, length - 1, at, max_n);
            if (n > longest) longest = n, found = at;
        }
        int64_t count = found < 0 ? 0 : length - found - 1;
        if (count > most) count = most;
        for (int64_t i = 0; i < most; i++) drafts[request * most + i] = i < count ? text[found + 1 + i] : 0;
        counts[request] = count;
    }
}
