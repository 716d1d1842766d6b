/* A whole proposal of an EAGLE-3 head with one layer as one call: `draft_plan.c` plans the passes, then the head's
 * input is made from the target's auxiliary states, and for each draft come the layer, the output and the choice of a token,
 * which the next pass embeds. What is computed is said by `Eagle3Head` in models/eagle.py and by `AutoregressiveDrafter`.
 *
 * The first pass has the token rows that the step computed. All of them write keys and values; the rest of the layer is
 * computed for the last one of each request alone, from which the first draft is made.
 */
#include "sampling.h"

#define COLUMNS 2048 /* of the output that a thread takes at once to find the best */
#define REFINED (128 / VL) /* groups of VL outputs of a request that are computed again if the output was coarse */
/* Errors, behind those of attention (1 to 3). An error of the plan is returned as BAD_PLAN plus its number. */
enum { UNKNOWN_TOKEN = 4, BAD_PLAN = UNKNOWN_TOKEN };
enum { LEVEL_BITS = 4, TOP_LEVEL = 15, MOST_PLACES = 15 }; /* as in core/draft_confidence.py */

/* A proposal: the target's auxiliary states [tokens, ..] of a step, and the planned passes, as in PlannedPasses. */
typedef struct {
    Requests contexts; /* page table and first keys */
    const float *const *aux_states;
    const int64_t *token_ids, *positions, *slots, *tail_page;
    const int64_t *last, *lengths, *live, *seed, *sample_index;
    const int64_t *draft_positions, *further_positions, *further_slots, *further_lengths, *further_live;
    const float *temperature;
    float *tails;             /* [pages, hidden], pages `tail_stride` floats apart */
    int64_t *drafts, *levels; /* [num_drafts, requests], [requests] */
    int64_t tail_stride, tokens, requests, num_drafts, any_sampled;
} Proposed;

/* The best of some outputs, their largest logit, and the sum of the exponentials of all logits relative to that. */
typedef struct {
    int64_t output;
    float score, top, mass;
} Best;

/* What the threads share of a call. Sizes of rows: `first` of the first pass that are computed, and one per request. */
typedef struct {
    const DraftHead *head;
    const Proposed *batch;
    int64_t first, blocks;
    int64_t *rows, *positions, *slots, *last; /* [first] token rows of the batch; [requests] places among them */
    int64_t *starts, *live;                   /* of attention: one query of each request */
    float *taken, *hidden, *joined, *qkv;     /* [first or requests, ..] */
    float *q, *mixed, *residual, *delta, *x, *wide, *inner, *logits; /* [requests, ..] */
    Best *best;                               /* [requests, blocks] */
    Attention attention;
    AttentionWork work;
    int64_t bad, failed, error, unknown; /* unknown: tokens outside of the embedding */
    int64_t stops; /* `unknown` of this pass: threads that are in the next one already may add to it */
} Chain;

static _Thread_local void *kept_chain;
static _Thread_local size_t chain_size;

static int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

/* Token rows of the first pass that are computed: live ones, and the last of each request. */
static int64_t count_rows(const Proposed *b) {
    int64_t count = 0;
    for (int64_t t = 0; t < b->tokens; t++) count += b->slots[t] >= 0;
    return count + b->requests;
}

static void choose_rows(Chain *c) {
    const Proposed *b = c->batch;
    int64_t next = 0;
    for (int64_t r = 0; r < b->requests; r++) c->last[r] = -1;
    for (int64_t t = 0; t < b->tokens; t++) {
        int is_last = 0;
        for (int64_t r = 0; r < b->requests; r++)
            if (b->last[r] == t) c->last[r] = next, is_last = 1;
        if (!is_last && b->slots[t] < 0) continue;
        c->rows[next] = t, c->positions[next] = b->positions[t], c->slots[next] = b->slots[t];
        next++;
    }
    c->first = next;
    for (int64_t r = 0; r < b->requests; r++) c->starts[r] = r, c->live[r] = b->live[r] > 0;
    c->starts[b->requests] = b->requests;
}

/* Returns 0 if there is no memory. */
static int find_memory(Chain *c) {
    const DraftHead *h = c->head;
    const int64_t most = count_rows(c->batch), requests = c->batch->requests, hidden = h->fc.outputs;
    c->blocks = (h->output.outputs + COLUMNS - 1) / COLUMNS;
    const int64_t ints = 3 * most + 3 * requests + 1;
    const int64_t sizes[] = {most * h->fc.inputs, most * hidden, most * 2 * hidden, most * h->qkv.outputs,
                             requests * h->out.inputs, requests * h->out.inputs, requests * hidden, requests * hidden,
                             requests * hidden, requests * greater(h->gate_up.outputs, 1), requests * h->down.inputs,
                             requests * h->output.outputs};
    float **parts[] = {&c->taken, &c->hidden, &c->joined, &c->qkv, &c->q, &c->mixed, &c->residual, &c->delta, &c->x,
                       &c->wide, &c->inner, &c->logits};
    size_t need = ints * sizeof(int64_t) + requests * c->blocks * sizeof(Best) + 128;
    for (int i = 0; i < 12; i++) need += (sizes[i] + 15) / 16 * 64;
    char *at = kept(&kept_chain, &chain_size, need);
    if (!at) return 0;
    for (int i = 0; i < 12; i++) *parts[i] = (float *)at, at += (sizes[i] + 15) / 16 * 64;
    c->best = (Best *)at, at += requests * c->blocks * sizeof(Best);
    c->rows = (int64_t *)at, c->positions = c->rows + most, c->slots = c->positions + most;
    c->last = c->slots + most, c->live = c->last + requests, c->starts = c->live + requests;
    return 1;
}

/* Called by one thread for all. List the attention of a pass; `c->error` says whether that failed. */
static void prepare_attention(Chain *c, int64_t pass, int threads) {
    const DraftHead *h = c->head;
    const Proposed *b = c->batch;
    Requests requests = b->contexts;
    requests.query_starts = c->starts, requests.wide_starts = 1;
    requests.lengths = pass ? b->further_lengths + (pass - 1) * b->requests : b->lengths, requests.wide_lengths = 1;
    requests.live = pass ? b->further_live + (pass - 1) * b->requests : c->live, requests.wide_live = 1;
    c->attention = (Attention){.requests = requests, .cache = h->cache, .q = c->q, .out = c->mixed,
                               .q_stride = h->out.inputs, .tokens = b->requests, .heads = h->heads,
                               .window = h->window, .scale = h->scale};
    c->error = list_attention(&c->attention, threads, &c->work);
}

/* The auxiliary states of a token row side by side, each behind its norm if it has one. */
static void take_aux_states(const Chain *c, int64_t at) {
    const DraftHead *h = c->head;
    const int64_t wide = h->fc.inputs / h->num_aux;
    for (int64_t i = 0; i < h->num_aux; i++) {
        const float *aux_state = c->batch->aux_states[i] + c->rows[at] * wide;
        float *to = c->taken + at * h->fc.inputs + i * wide;
        if (h->aux_norms)
            norm_row(aux_state, NULL, h->aux_norms[i], to, wide, h->eps);
        else
            memcpy(to, aux_state, wide * sizeof(float));
    }
}

/* Hidden states of token rows that end a page are kept with the page. */
static void keep_tails(const Chain *c) {
    const Proposed *b = c->batch;
    const int64_t hidden = c->head->fc.outputs;
    for (int64_t at = 0; at < c->first; at++) {
        int64_t page = b->tail_page[c->rows[at]];
        if (page > 0) memcpy(b->tails + page * b->tail_stride, c->hidden + at * hidden, hidden * sizeof(float));
    }
}

/* Returns 0 if the embedding has no such token. */
static int embed(const DraftHead *h, int64_t token, float *out) {
    const int64_t hidden = h->fc.outputs;
    if (token < 0 || token >= h->num_embeddings) return 0;
    if (h->embedding_kind == PACKED)
        unpack_row(h->embedding, hidden, token, out);
    else
        memcpy(out, (const char *)h->embedding + token * h->embedding_bytes, hidden * sizeof(float));
    return 1;
}

/* The layer's input of row `at`: embedding and hidden state side by side, each behind its norm. */
static void join(Chain *c, int64_t at, int64_t token, const float *hidden) {
    const DraftHead *h = c->head;
    const int64_t width = h->fc.outputs;
    float *to = c->joined + at * 2 * width;
    if (!embed(h, token, to)) {
#pragma omp atomic
        c->unknown += 1;
        memset(to, 0, width * sizeof(float));
    }
    norm_row(to, NULL, h->embedding_norm, to, width, h->eps);
    norm_row(hidden, NULL, h->hidden_norm, to + width, width, h->eps);
}

/* Query and residual stream of a request, from its row of the pass. */
static void begin_request(Chain *c, int64_t pass, int64_t r) {
    const DraftHead *h = c->head;
    const int64_t width = h->fc.outputs, at = pass ? r : c->last[r];
    const float *normed = c->joined + at * 2 * width + width, *plain = c->hidden + at * width;
    memcpy(c->q + r * h->out.inputs, c->qkv + at * h->qkv.outputs, h->out.inputs * sizeof(float));
    memcpy(c->residual + r * width, h->norm_before_residual ? normed : plain, width * sizeof(float));
}

/* The best of columns [from, to) of a request's logits, the first of equals; with the noise of the draft's position. */
static Best find_best(const Chain *c, int64_t pass, int64_t r, int64_t from, int64_t to) {
    const Proposed *b = c->batch;
    const float *logits = c->logits + r * c->head->output.outputs;
    vf most = splat(-INFINITY), total = {0};
    int64_t i = from;
    for (; i + VL <= to; i += VL) most = vmax(load(logits + i), most);
    Best best = {from, -INFINITY, max_lanes(most), 0.0f};
    for (; i < to; i++) best.top = logits[i] > best.top ? logits[i] : best.top;
    for (i = from; i + VL <= to; i += VL) total += vexp(load(logits + i) - best.top);
    best.mass = sum_lanes(total);
    for (; i < to; i++) best.mass += expf(logits[i] - best.top);
    if (b->any_sampled && b->temperature[r] > 0) {
        LogitRow row = {.temperature = b->temperature[r]};
        row.key[0] = (uint32_t)b->seed[r], row.key[1] = (uint32_t)((uint64_t)b->seed[r] >> 32);
        row.words[0] = (uint32_t)b->draft_positions[pass * b->requests + r];
        row.words[1] = (uint32_t)b->sample_index[r];
        best.output = draw_of_ids(&row, logits, c->head->target_ids, from, to, &best.score);
        return best;
    }
    best.score = best.top;
    for (i = from; i < to; i++)
        if (logits[i] == best.top) {
            best.output = i;
            break;
        }
    return best;
}

/* How sure the head is of an output: see core/draft_confidence.py. Level 1 where logits are not finite. */
static int64_t level_of(const Chain *c, int64_t r, int64_t output) {
    const Best *blocks = c->best + r * c->blocks;
    const float chosen = c->logits[r * c->head->output.outputs + output];
    float mass = 0.0f;
    for (int64_t i = 0; i < c->blocks; i++) mass += blocks[i].mass * expf(blocks[i].top - chosen);
    const float share = TOP_LEVEL / mass;
    return 1 + (share > 0 ? share < TOP_LEVEL - 1 ? (int64_t)share : TOP_LEVEL - 1 : 0);
}

static void share_draw(Chain *c, int64_t pass, Team *team) {
    const Proposed *b = c->batch;
    const int64_t outputs = c->head->output.outputs;
    Loop loop = start_loop(team, b->requests * c->blocks);
    for (int64_t i; (i = next_piece(&loop)) >= 0;) {
        int64_t from = i % c->blocks * COLUMNS, to = outputs - from < COLUMNS ? outputs : from + COLUMNS;
        c->best[i] = find_best(c, pass, i / c->blocks, from, to);
    }
    meet(team);
#pragma omp for nowait
    for (int64_t r = 0; r < b->requests; r++) {
        Best best = c->best[r * c->blocks];
        for (int64_t i = 1; i < c->blocks; i++)
            if (c->best[r * c->blocks + i].score > best.score) best = c->best[r * c->blocks + i];
        const int64_t *ids = c->head->target_ids;
        b->drafts[pass * b->requests + r] = ids ? ids[best.output] : best.output;
        if (!pass) b->levels[r] = 0;
        if (pass < MOST_PLACES) b->levels[r] |= level_of(c, r, best.output) << LEVEL_BITS * pass;
    }
    meet(team);
}

/* The logits of a request that came from the coarse output: lanes with the largest are computed again with all bits. */
static void refine(const Chain *c, int64_t r) {
    const DraftHead *h = c->head;
    const int64_t outputs = h->output.outputs;
    float *logits = c->logits + r * outputs, tops[REFINED];
    int64_t lanes[REFINED], count = 0;
    for (int64_t lane = 0; lane * VL < outputs; lane++) {
        const int64_t left = outputs - lane * VL;
        float top = logits[lane * VL];
        if (left >= VL) top = max_lanes(load(logits + lane * VL));
        for (int64_t i = 1; i < left && left < VL; i++) top = logits[lane * VL + i] > top ? logits[lane * VL + i] : top;
        if (count == REFINED && !(top > tops[REFINED - 1])) continue;
        int64_t at = count < REFINED ? count++ : REFINED - 1; /* the largest first */
        for (; at > 0 && top > tops[at - 1]; at--) tops[at] = tops[at - 1], lanes[at] = lanes[at - 1];
        tops[at] = top, lanes[at] = lane;
    }
    packed_lanes_product(&h->output, c->x + r * h->output.inputs, logits, lanes, count);
}

static void share_logits(Chain *c, Team *team) {
    const DraftHead *h = c->head;
    const int64_t requests = c->batch->requests;
    share_product(h->coarse.data ? &h->coarse : &h->output, c->x, h->output.inputs, c->logits, requests, NULL, team);
    if (!h->coarse.data) return;
#pragma omp for nowait
    for (int64_t r = 0; r < requests; r++) refine(c, r);
    meet(team);
}

static void share_pass(Chain *c, int64_t pass, Team *team) {
    const DraftHead *h = c->head;
    const Proposed *b = c->batch;
    const int64_t hidden = h->fc.outputs, requests = b->requests, rows = pass ? requests : c->first;
    const float *given = !pass ? c->hidden : h->feeds_back_normed ? c->x : c->residual; /* of the pass before */
    const Rope rope = {.cache = h->cache, .heads = h->heads, .q_norm = h->q_norm, .k_norm = h->k_norm,
                       .eps = h->norm_eps, .cos = h->cos, .sin = h->sin, .cos_stride = h->cos_stride,
                       .sin_stride = h->sin_stride, .max_len = h->max_len, .rotary = h->rotary,
                       .positions = pass ? b->further_positions + (pass - 1) * requests : c->positions,
                       .slots = pass ? b->further_slots + (pass - 1) * requests : c->slots};
#pragma omp for nowait
    for (int64_t at = 0; at < rows; at++) {
        join(c, at, pass ? b->drafts[(pass - 1) * requests + at] : b->token_ids[c->rows[at]], given + at * hidden);
        if (pass) memcpy(c->hidden + at * hidden, given + at * hidden, hidden * sizeof(float));
    }
    meet(team);
#pragma omp master
    c->stops = c->unknown;
    share_product(&h->qkv, c->joined, 2 * hidden, c->qkv, rows, NULL, team);
    share_rope_write(c->qkv, h->qkv.outputs, rows, &rope, &c->bad, team);
#pragma omp for nowait
    for (int64_t r = 0; r < requests; r++) begin_request(c, pass, r);
    meet(team);
    share_attention(&c->work, &c->failed, team);
#pragma omp master
    if (pass + 1 < b->num_drafts) prepare_attention(c, pass + 1, team->threads);
    share_product(&h->out, c->mixed, h->out.inputs, c->delta, requests, NULL, team);
    share_norm(c->delta, hidden, c->residual, hidden, h->mlp_norm, c->x, requests, hidden, h->eps, team);
    share_product(&h->gate_up, c->x, hidden, c->wide, requests, &(Gates){c->inner, h->down.inputs, h->gelu}, team);
    share_product(&h->down, c->inner, h->down.inputs, c->delta, requests, NULL, team);
    share_norm(c->delta, hidden, c->residual, hidden, h->norm, c->x, requests, hidden, h->eps, team);
    share_logits(c, team);
    share_draw(c, pass, team);
}

/* Returns 0, minus the number of rows whose position or slot is out of range, an error of the attention (1 to 3), or
 * UNKNOWN_TOKEN. */
static int64_t run_passes(const DraftHead *head, const Proposed *batch, int threads) {
    Chain chain = {.head = head, .batch = batch};
    Team team = {.threads = threads};
    if (!find_memory(&chain)) return 3;
    choose_rows(&chain);
    prepare_attention(&chain, 0, threads);
    PARALLEL(threads) {
#pragma omp for nowait
        for (int64_t at = 0; at < chain.first; at++) take_aux_states(&chain, at);
        meet(&team);
        share_product(&head->fc, chain.taken, head->fc.inputs, chain.hidden, chain.first, NULL, &team);
#pragma omp master
        keep_tails(&chain);
        for (int64_t pass = 0; pass < batch->num_drafts && !chain.error; pass++) {
            share_pass(&chain, pass, &team);
            if (chain.bad || chain.failed || chain.stops) break;
        }
    }
    if (chain.error) return chain.error;
    return chain.bad ? -chain.bad : chain.failed ? 2 : chain.unknown ? UNKNOWN_TOKEN : 0;
}

static _Thread_local void *kept_plan;
static _Thread_local size_t plan_size;

/* Memory for the planned passes, and the proposal that reads them. Returns 0 if there is none. */
static int find_plan(const DraftPlan *p, const ChainStep *s, PlannedPasses *out, DraftTable *table, Proposed *b) {
    const int64_t n = p->requests, all = p->num_wanted * n, later = all - n;
    const int64_t ints = 4 * p->tokens + 6 * n + 4 * later + all;
    int64_t *at = kept(&kept_plan, &plan_size, ints * sizeof(int64_t) + (3 * n + 2 * later) * 4 + n * sizeof(float));
    if (!at) return 0;
    int64_t *slots, *further_slots;
    int64_t **per_token[] = {&out->positions, &out->tokens, &out->tail_page, &slots};
    int64_t **per_request[] = {&out->lengths, &out->live, &out->key_starts, &out->seed, &out->sample_index, &out->last};
    int64_t **per_draft[] = {&out->further_positions, &out->further_lengths, &out->further_live, &further_slots};
    for (int i = 0; i < 4; i++) *per_token[i] = at, at += p->tokens;
    for (int i = 0; i < 6; i++) *per_request[i] = at, at += n;
    for (int i = 0; i < 4; i++) *per_draft[i] = at, at += later;
    out->draft_positions = at, at += all;
    out->counts = s->counts;
    int32_t *narrow = (int32_t *)at;
    out->lengths32 = narrow, out->live32 = narrow + n, out->key_starts32 = narrow + 2 * n;
    out->further_lengths32 = narrow + 3 * n, out->further_live32 = narrow + 3 * n + later;
    out->temperature = (float *)(narrow + 3 * n + 2 * later);
    *table = (DraftTable){s->pages, slots, further_slots, s->table_stride, s->table_width, s->page_tokens};
    *b = (Proposed){
        .contexts = {.page_table = s->pages, .key_starts = out->key_starts, .table_stride = s->table_stride,
                     .table_width = s->table_width, .count = n},
        .token_ids = out->tokens, .positions = out->positions, .slots = slots,
        .tail_page = out->tail_page, .last = out->last, .lengths = out->lengths, .live = out->live, .seed = out->seed,
        .sample_index = out->sample_index, .draft_positions = out->draft_positions,
        .further_positions = out->further_positions, .further_slots = further_slots,
        .further_lengths = out->further_lengths, .further_live = out->further_live, .temperature = out->temperature,
        .tails = s->tails, .drafts = s->drafts, .levels = s->levels, .tail_stride = s->tail_stride,
        .tokens = p->tokens, .requests = n, .num_drafts = p->num_wanted, .any_sampled = s->any_sampled};
    return 1;
}

/* `plan->groups` is 1. Returns 0, an error of `run_passes`, or BAD_PLAN plus an error of the plan. */
int64_t propose_chain(const DraftHead *head, const DraftPlan *plan, const ChainStep *step, const float *const *aux_states,
                      int threads) {
    PlannedPasses passes;
    DraftTable table;
    Proposed batch;
    if (!find_plan(plan, step, &passes, &table, &batch)) return 3;
    batch.aux_states = aux_states;
    const int error = plan_draft_passes(plan, &table, &passes);
    return error ? BAD_PLAN + error : run_passes(head, &batch, threads);
}
