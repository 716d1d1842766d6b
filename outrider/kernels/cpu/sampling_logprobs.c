/* Log-probabilities of the chosen token and of the likeliest ones: of the model's own logits, or (processed) of the
 * scaled logits that are kept. Twin of `report_tokens` in sample/logprobs.py, and the only place where the CPU adds the
 * exponentials of float32 logits, for sampled tokens and for those of prompts. Equal values are ordered by token id.
 */
#include "sampling.h"

/* What log-probabilities are of. */
INLINE float reported_of(const Sampling *s, const LogitRow *r, float logit) {
    if (!s->in->is_processed) return logit;
    float scaled = scaled_of(r, logit);
    return scaled < scaled_at(r->furthest) ? -INFINITY : scaled;
}

INLINE vf reported_lanes(const Sampling *s, const LogitRow *r, vf logits) {
    if (!s->in->is_processed) return logits;
    vf scaled = (logits - r->greatest) / r->temperature;
    return pick(scaled < scaled_at(r->furthest), splat(-INFINITY), scaled);
}

INLINE const float *reported_logits(const Sampling *s, const LogitRow *r) {
    return s->in->is_processed ? r->logits : r->raw;
}

INLINE const float *reported_groups(const Sampling *s, const LogitRow *r) {
    return s->in->is_processed ? r->groups : r->raw_groups;
}

/* The greatest of what is reported. */
INLINE float most_of(const Sampling *s, const LogitRow *r) { return s->in->is_processed ? 0.0f : r->raw_greatest; }

/* The sum of a block, lane by lane in the order of its tokens. */
void add_exponentials(const Sampling *s, LogitRow *r, int64_t block) {
    float most = most_of(s, r), room[GROUP];
    const float *logits = reported_logits(s, r), *groups = reported_groups(s, r);
    vf total = {0};
    for (int64_t first = block * BLOCK; first < lower(block * BLOCK + BLOCK, s->in->vocab); first += GROUP) {
        if (reported_of(s, r, groups[first / GROUP]) - most < -88.0f) continue; /* each adds 0 */
        const float *own = load_group(logits, first, s->in->vocab, room);
        for (int i = 0; i < GROUP; i += VL) total += vexp(reported_lanes(s, r, load(own + i)) - most);
    }
    r->blocks[block].sum = sum_lanes(total);
}

/* 1 + the number of tokens that are likelier than the chosen one. */
static int64_t rank_of(const Sampling *s, const LogitRow *r, float chosen) {
    const float *logits = reported_logits(s, r), *groups = reported_groups(s, r);
    float room[GROUP];
    vi likelier = {0};
    for (int64_t g = 0; g < s->groups; g++) {
        if (!(reported_of(s, r, groups[g]) > chosen)) continue;
        const float *own = load_group(logits, g * GROUP, s->in->vocab, room);
        for (int i = 0; i < GROUP; i += VL) likelier -= reported_lanes(s, r, load(own + i)) > chosen;
    }
    int64_t rank = 1;
    for (int i = 0; i < VL; i++) rank += likelier[i];
    return rank;
}

/* The greatest numbers so far, in descending order; of equals the first that came is the first. */
typedef struct {
    float values[MOST_TOP];
    int64_t ids[MOST_TOP], count, room;
} Top;

static void enter(Top *top, float value, int64_t id) {
    if (top->count == top->room && !(top->room && value > top->values[top->count - 1])) return;
    int64_t at = top->count < top->room ? top->count++ : top->count - 1;
    for (; at > 0 && value > top->values[at - 1]; at--)
        top->values[at] = top->values[at - 1], top->ids[at] = top->ids[at - 1];
    top->values[at] = value, top->ids[at] = id;
}

/* As many groups have a token that reaches the last of the greatest groups, so the likeliest tokens reach it too. */
static void find_top(const Sampling *s, const LogitRow *r, Top *top) {
    const float *logits = reported_logits(s, r), *groups = reported_groups(s, r);
    float least = -INFINITY;
    for (int64_t g = 0; g < s->groups; g++) enter(top, reported_of(s, r, groups[g]), g);
    if (top->count == top->room && top->room) least = top->values[top->count - 1];
    top->count = 0;
    for (int64_t g = 0; g < s->groups && top->room; g++) {
        if (reported_of(s, r, groups[g]) < least) continue;
        for (int64_t t = g * GROUP; t < lower(g * GROUP + GROUP, s->in->vocab); t++)
            enter(top, reported_of(s, r, logits[t]), t);
    }
}

void report_row(const Sampling *s, const LogitRow *r, int64_t at) {
    double total = 0;
    for (int64_t b = 0; b < s->blocks; b++) total += r->blocks[b].sum;
    float most = most_of(s, r), norm = (float)log(total);
    s->out->most[at] = most, s->out->norm[at] = norm;
    int64_t width = s->in->num_top, asked = s->state->num_logprobs[r->of], *ids = s->out->ids + at * (2 + width);
    float *values = s->out->values + at * (1 + width);
    float chosen = reported_of(s, r, reported_logits(s, r)[r->token]);
    Top top = {.room = lower(lower(asked < 0 ? width : asked, width), lower(s->in->vocab, MOST_TOP))};
    find_top(s, r, &top);
    ids[0] = rank_of(s, r, chosen), ids[1] = r->token;
    values[0] = chosen - most - norm;
    for (int64_t i = 0; i < top.count; i++) {
        ids[2 + i] = top.ids[i];
        values[1 + i] = top.values[i] - most - norm;
    }
}

/* A row with a NaN or an infinite logit, or with none but -inf: its given token has no log-probability. */
void report_bad_row(const Sampling *s, const LogitRow *r, int64_t at) {
    int64_t width = s->in->num_top, *ids = s->out->ids + at * (2 + width);
    s->out->most[at] = s->out->norm[at] = NAN;
    ids[0] = 1, ids[1] = r->token;
    for (int64_t i = 0; i < width; i++) ids[2 + i] = i;
    for (int64_t i = 0; i <= width; i++) s->out->values[at * (1 + width) + i] = NAN;
}
