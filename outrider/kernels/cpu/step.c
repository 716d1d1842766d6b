/* A step's bookkeeping on the CPU: integers of row state before the forward pass and after the sampler. The meaning of
 * each function is its twin in kernels/step.py, integer for integer.
 */
#include "native.h"

enum { FINISH_NO = 0, FINISH_STOP = 1, FINISH_LENGTH = 2, FINISH_ERROR = 4 }; /* as in core/step_messages.py */
enum { PROPOSED = 5, FAULT = 6, FAULT_VALUE = 7, LEVELS = 8, NUM_COUNTS = 9 }; /* columns of counts, as in kernels/step.py */

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int has_rows(const RowState *s, const int64_t *rows, int64_t requests) {
    for (int64_t r = 0; r < requests; r++)
        if (rows[r] < 0 || rows[r] >= s->rows) return 0;
    return 1;
}

static void prepare_request(const RowState *s, const StepInputs *in, const PreparedRequests *out, int64_t r) {
    int64_t row = in->rows[r], is_alive = s->alive[row] && row != in->null_row;
    int64_t samples = is_alive && in->samples[r] > 0, known = is_alive ? in->num_known[r] : 0;
    int64_t room = most(s->end_len[row] - s->known[row] - 1, 0); /* drafts past the end could never be accepted */
    int64_t drafts = samples ? least(least(in->num_drafts[r], s->num_drafts[row]), room) : 0;
    int64_t length = is_alive ? s->computed[row] + known + drafts : 0;
    out->computed[r] = s->computed[row];
    out->num_known[r] = known;
    out->num_drafts[r] = drafts;
    out->live[r] = known + drafts;
    out->lengths[r] = length;
    out->samples[r] = (uint8_t)samples;
    out->first_logit[r] = 0;
    out->lengths32[r] = (int32_t)length;
    out->live32[r] = (int32_t)(known + drafts);
    memcpy(out->drafts + r * in->max_drafts, s->drafts + row * s->draft_stride, in->max_drafts * sizeof(int64_t));
}

/* Returns 0 if a page table is too short. */
static int prepare_token(const RowState *s, const StepInputs *in, const PreparedRequests *requests,
                         const PreparedTokens *out, const PageTable *tables, int64_t t) {
    int64_t r = in->request_of[t], offset = in->offset[t], live = requests->live[r], known = requests->num_known[r];
    int64_t row = in->rows[r], is_live = offset < live;
    int64_t position = least(requests->computed[r] + least(offset, most(live - 1, 0)), in->max_len - 1);
    int64_t token = s->tokens[row * s->token_stride + position];
    if (in->max_drafts && offset >= known)
        token = s->drafts[row * s->draft_stride + most(least(offset - known, in->max_drafts - 1), 0)];
    out->positions[t] = position;
    out->token_ids[t] = is_live ? token : 0;
    for (int64_t g = 0; g < in->groups; g++) {
        const PageTable *table = tables + g;
        int64_t column = position / table->page_tokens;
        if (column >= table->width) return 0;
        int64_t page = table->to[r * table->width + column];
        table->slots[t] = is_live ? page * table->page_tokens + position % table->page_tokens : -1;
    }
    return 1;
}

/* Returns 0, or what is wrong: 1 a row, a request or a logit row out of range, 2 a page table that is too short. */
int prepare_step(const RowState *s, const StepInputs *in, const PageTable *tables, const PreparedRequests *requests,
                 const PreparedTokens *out) {
    if (!has_rows(s, in->rows, in->requests)) return 1;
    for (int64_t r = 0; r < in->requests; r++) {
        prepare_request(s, in, requests, r);
        for (int64_t g = 0; g < in->groups; g++)
            memcpy(tables[g].to + r * tables[g].width, tables[g].from + in->rows[r] * tables[g].stride,
                   tables[g].width * sizeof(int32_t));
    }
    for (int64_t r = 0; r <= in->requests; r++) requests->starts32[r] = (int32_t)in->query_starts[r];
    for (int64_t t = 0; t < in->tokens; t++) {
        if (in->request_of[t] < 0 || in->request_of[t] >= in->requests) return 1;
        if (!prepare_token(s, in, requests, out, tables, t)) return 2;
    }
    for (int64_t l = 0; l < in->logit_rows; l++) {
        int64_t r = in->logit_request[l];
        if (r < 0 || r >= in->requests) return 1;
        if (in->logit_draft[l] == 0) requests->first_logit[r] = l;
        int is_asked = requests->samples[r] && in->logit_draft[l] <= requests->num_drafts[r];
        out->logit_row[l] = is_asked ? in->rows[r] : in->null_row;
        out->logit_position[l] = s->known[in->rows[r]] + in->logit_draft[l];
    }
    return 0;
}

static int is_stop(const RowState *s, int64_t row, int64_t token) {
    for (int64_t i = 0; i < s->num_stop_ids[row] && i < s->stop_width; i++)
        if (s->stop_ids[row * s->stop_stride + i] == token) return 1;
    return 0;
}

/* How many drafts are accepted, the run, and how the request ends: see `accept` in kernels/accept.py. */
static void accept(const RowState *s, const SampledStep *in, const Committed *out, int64_t r) {
    int64_t row = in->rows[r], width = in->max_drafts + 1, known = s->known[row], samples = in->samples[r];
    int64_t reached = samples && in->logit_rows ? least(in->num_drafts[r] + 1, width) : 0;
    int64_t *run = out->run + r * width, accepted = 0, first_stop = width, first_bad = width;
    for (int64_t i = 0; i < width; i++) {
        int64_t at = most(least(in->first_logit[r] + i, in->logit_rows - 1), 0);
        run[i] = i < reached ? in->sampled[at] : 0;
        if (first_bad == width && i < reached && in->bad[at]) first_bad = i;
        if (first_stop == width && is_stop(s, row, run[i])) first_stop = i;
    }
    const int64_t *drafts = in->drafts + r * in->draft_stride;
    while (accepted < least(in->max_drafts, in->num_drafts[r]) && drafts[accepted] == run[accepted]) accepted++;
    int64_t room = most(s->end_len[row] - known, 0), length = least(least(accepted, first_stop) + 1, room);
    int64_t finish = length >= room ? FINISH_LENGTH : FINISH_NO;
    if (first_bad < length) finish = FINISH_ERROR;
    length = least(length, first_bad);
    if (first_stop < length) finish = FINISH_STOP;
    if (!samples) length = 0, finish = FINISH_NO;
    for (int64_t i = length; i < width; i++) run[i] = 0;
    out->run_len[r] = length;
    out->finish[r] = finish;
    out->num_accepted[r] = least(accepted, most(length - 1, 0));
}

static void update_row(const RowState *s, const SampledStep *in, const Committed *out, int64_t r) {
    int64_t row = in->rows[r], length = out->run_len[r], known = s->known[row];
    int64_t computed = in->num_known[r] + out->num_accepted[r];
    for (int64_t i = 0; i < length && known + i < s->length; i++)
        s->tokens[row * s->token_stride + known + i] = out->run[r * (in->max_drafts + 1) + i];
    s->known[row] += length;
    s->computed[row] += computed;
    s->alive[row] = s->alive[row] && out->finish[r] == FINISH_NO;
    s->num_drafts[row] = 0; /* consumed, or stale */
    out->num_computed[r] = computed;
    out->goes_on[r] = length > 0 && out->finish[r] == FINISH_NO;
    int64_t counts[NUM_COUNTS] = {length, out->finish[r], computed, in->num_drafts[r], out->num_accepted[r]};
    memcpy(out->counts + r * NUM_COUNTS, counts, sizeof counts);
}

/* Returns 0, or 1 if a row is out of range, with nothing done. */
int commit_step(const RowState *s, const SampledStep *in, const Committed *out) {
    if (!has_rows(s, in->rows, in->requests)) return 1;
    for (int64_t r = 0; r < in->requests; r++) accept(s, in, out, r);
    for (int64_t r = 0; r < in->requests; r++) update_row(s, in, out, r);
    return 0;
}

/* The drafts of one drafter for one request. Returns 0, or 1 for a count out of range, 2 for a token id outside of the
 * vocabulary; then `value` is what was wrong. */
static int check_proposal(const StoredDrafts *in, const Proposal *from, int64_t r, int64_t *value) {
    int64_t count = from->counts[r];
    *value = count;
    if (count < 0 || count > in->num_wanted) return 1;
    for (int64_t i = 0; i < count; i++) {
        int64_t token = from->tokens[r * from->request_stride + i * from->index_stride];
        *value = token;
        if (token < 0 || token >= in->vocab_size) return 2;
    }
    return 0;
}

/* Returns 0, or 1 if a row is out of range, with nothing done. */
int store_drafts(const StoredDrafts *in, const Proposal *proposals) {
    for (int64_t r = 0; r < in->requests; r++)
        if (in->rows[r] < 0 || in->rows[r] >= in->num_rows) return 1;
    for (int64_t r = 0; r < in->requests; r++) {
        int64_t *counts = in->counts + r * in->counts_stride, *drafts = in->drafts + in->rows[r] * in->draft_stride;
        int64_t count = 0, levels = 0;
        memset(drafts, 0, in->num_wanted * sizeof(int64_t));
        counts[FAULT] = counts[FAULT_VALUE] = 0;
        for (int64_t p = 0; p < in->num_proposals && in->goes_on[r]; p++) {
            const Proposal *from = proposals + p;
            int64_t value;
            if (in->is_on[p] <= 0) continue;
            int wrong = check_proposal(in, from, r, &value);
            if (wrong && !counts[FAULT]) counts[FAULT] = wrong + 2 * p, counts[FAULT_VALUE] = value;
            if (wrong || count) continue;
            count = from->counts[r];
            if (count && from->levels) levels = from->levels[r];
            for (int64_t i = 0; i < count; i++) drafts[i] = from->tokens[r * from->request_stride + i * from->index_stride];
        }
        if (in->fills) count = in->goes_on[r] ? in->num_wanted : 0;
        counts[PROPOSED] = in->num_drafts[in->rows[r]] = count;
        counts[LEVELS] = in->levels[in->rows[r]] = levels;
    }
    return 0;
}

/* Adds 1 to the count of run[r, i] in its row for every i below the run's length: see `count_runs` in reference.py.
 * Returns 1 if a row or a token is out of range, with nothing counted from there on. */
int count_runs(const int64_t *rows, const int64_t *run, const int64_t *run_len, int64_t requests, int64_t run_width,
               int32_t *counts, int64_t num_rows, int64_t vocab) {
    for (int64_t r = 0; r < requests; r++)
        for (int64_t i = 0; i < least(run_len[r], run_width); i++) {
            int64_t token = run[r * run_width + i];
            if (rows[r] < 0 || rows[r] >= num_rows || token < 0 || token >= vocab) return 1;
            counts[rows[r] * vocab + token]++;
        }
    return 0;
}
