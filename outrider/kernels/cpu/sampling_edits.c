/* Edits of logits: allowed tokens, bad words, min_tokens, logit bias, penalties, masks. Twins of the functions of
 * sample/edits.py, in their order; every product, sum and quotient is rounded by itself, so edited logits are theirs bit
 * for bit. The counts of a row are those of its known tokens; the drafts before a logit row are added here.
 */
#include "sampling.h"

/* -inf for the tokens [first, last) whose bit is not set; `first` is a multiple of 32. */
static void keep_masked(float *logits, const int32_t *mask, int64_t first, int64_t last) {
    for (int64_t at = first; at < last; at += 32) {
        uint32_t word = (uint32_t)mask[at / 32];
        int count = (int)lower(32, last - at);
        if (word == UINT32_MAX) continue;
        for (int i = 0; i < count; i++) logits[at + i] = word >> i & 1 ? logits[at + i] : -INFINITY;
    }
}

/* The token at a position of a row's text, -1 outside. */
static int64_t token_at(const LogitRows *in, int64_t of, int64_t position) {
    int64_t known = in->known[of], index = position - known;
    if (position < 0 || index >= in->max_drafts) return -1;
    return index < 0 ? in->tokens[of * in->token_stride + position] : in->drafts[of * in->draft_stride + index];
}

/* A word is (offset, length) in the row's list; its tokens lie backwards, the forbidden one first. */
static void forbid_bad_words(const Sampling *s, const LogitRow *r, int64_t first, int64_t last) {
    const int32_t *list = s->state->lists + s->state->words_start[r->of];
    for (int64_t w = 0; w < s->state->num_words[r->of]; w++) {
        const int32_t *word = list + list[2 * w];
        int64_t length = list[2 * w + 1], back = 1;
        if (word[0] < first || word[0] >= last) continue;
        while (back < length && word[back] == token_at(s->in, r->of, r->position - back)) back++;
        if (back == length) r->edited[word[0]] += -INFINITY;
    }
}

static void forbid_early_stops(const Sampling *s, const LogitRow *r, int64_t first, int64_t last) {
    const SamplingRows *state = s->state;
    if (r->position - state->prompt_len[r->of] >= state->min_tokens[r->of]) return;
    for (int64_t i = 0; i < state->num_stop_ids[r->of]; i++) {
        int64_t token = state->stop_ids[r->of * state->stop_stride + i];
        if (token >= first && token < last) r->edited[token] += -INFINITY;
    }
}

/* As many ids as values, whose bits are those of floats. */
static void add_bias(const Sampling *s, const LogitRow *r, int64_t first, int64_t last) {
    int64_t size = s->state->bias_len[r->of];
    const int32_t *ids = s->state->lists + s->state->bias_start[r->of];
    for (int64_t i = 0; i < size; i++)
        if (ids[i] >= first && ids[i] < last) r->edited[ids[i]] += float_of((uint32_t)ids[size + i]);
}

INLINE float penalised(float logit, int32_t packed, float repetition, float frequency, float presence) {
    float outputs = (float)(packed & OUTPUTS);
    logit = logit > 0 ? logit / repetition : logit * repetition;
    logit -= outputs * frequency;
    return logit - (outputs > 0 ? presence : 0.0f);
}

static void penalise(const Sampling *s, const LogitRow *r, int64_t first, int64_t last) {
    int32_t room[BLOCK];
    const int32_t *counts = s->state->counts + r->of * s->state->count_stride + first;
    const int64_t *drafts = s->in->drafts + r->of * s->in->draft_stride;
    for (int64_t i = 0; i < r->num_before; i++) {
        if (drafts[i] < first || drafts[i] >= last) continue;
        if (counts != room) counts = memcpy(room, counts, (last - first) * sizeof(int32_t));
        room[drafts[i] - first]++;
    }
    float repetition = s->state->repetition[r->of], frequency = s->state->frequency[r->of];
    float presence = s->state->presence[r->of];
    for (int64_t at = 0; at < last - first; at += 16) { /* most tokens are not in the text */
        int64_t end = lower(at + 16, last - first);
        int32_t any = 0;
        for (int64_t i = at; i < end; i++) any |= counts[i];
        if (!any) continue;
        for (int64_t i = at; i < end; i++)
            if (counts[i])
                r->edited[first + i] = penalised(r->edited[first + i], counts[i], repetition, frequency, presence);
    }
}

/* Tokens [first, last): a copy with single logits changed. */
void edit_block(const Sampling *s, LogitRow *r, int64_t first, int64_t last) {
    const SamplingRows *state = s->state;
    memcpy(r->edited + first, r->raw + first, (last - first) * sizeof(float));
    if (r->flags & ALLOWED) keep_masked(r->edited, state->allowed + r->of * state->allowed_stride, first, last);
    if (r->flags & BAD_WORDS) forbid_bad_words(s, r, first, last);
    if (r->flags & MIN_TOKENS) forbid_early_stops(s, r, first, last);
    if (r->flags & BIAS) add_bias(s, r, first, last);
    if (r->flags & PENALTIES) penalise(s, r, first, last);
    if (r->flags & MASKED) {
        int64_t mask = r->of * state->masks_per_row + lower(r->num_before, state->masks_per_row - 1);
        keep_masked(r->edited, state->masks + mask * state->mask_stride, first, last);
    }
}
