/* A proposal's bookkeeping on the CPU: where the token rows of every drafting pass lie, and which slots and pages of the
 * drafter are filled. The meaning of each function is its twin in kernels/drafting.py, integer for integer.
 */
#include "native.h"

#define NULL_PAGE 0

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int has_rows(const DraftPlan *p) {
    for (int64_t r = 0; r < p->requests; r++)
        if (p->rows[r] < 0 || p->rows[r] >= p->num_rows) return 0;
    for (int64_t t = 0; t < p->tokens; t++)
        if (p->request_of[t] < 0 || p->request_of[t] >= p->requests) return 0;
    return 1;
}

/* The page whose last token is token row t, or the null page. */
static int64_t ended_page(const DraftPlan *p, const DraftTable *table, int64_t t, int64_t *first) {
    int64_t r = p->request_of[t], offset = t - p->query_starts[r], position = p->computed_before[r] + offset;
    int64_t column = least(position / table->page_tokens, table->width - 1);
    *first = column * table->page_tokens;
    if (offset < 0 || offset >= p->num_computed[r]) return NULL_PAGE;
    if (position % table->page_tokens != table->page_tokens - 1) return NULL_PAGE;
    return table->pages[r * table->stride + column];
}

/* Pages whose last token the step computed are valid for a hit if all their slots are filled, and never without
 * `key_starts`. Returns 0 if a page does not exist. */
static int mark_pages(const DraftPlan *p, const DraftTable *tables, const int64_t *key_starts) {
    for (int64_t g = 0; g < p->groups; g++)
        for (int64_t t = 0; t < p->tokens; t++) {
            int64_t first, page = ended_page(p, tables + g, t, &first);
            if (page == NULL_PAGE) continue;
            if (page < 0 || page >= p->num_pages) return 0;
            int is_valid = key_starts && key_starts[p->request_of[t]] <= most(first, p->first_position);
            p->page_valid[page * p->page_stride] = (uint8_t)is_valid;
        }
    return 1;
}

/* Returns 0 if the position lies behind the page table. */
static int find_slot(const DraftTable *table, int64_t r, int64_t position, int is_live, int64_t *slot) {
    int64_t column = position / table->page_tokens;
    if (position < 0 || column >= table->width) return 0;
    int64_t page = table->pages[r * table->stride + column];
    *slot = is_live ? page * table->page_tokens + position % table->page_tokens : -1;
    return 1;
}

static void plan_request(const DraftPlan *p, const PlannedPasses *out, int64_t r) {
    int64_t row = p->rows[r], count = p->num_computed[r], begin = p->computed_before[r] + 1;
    int64_t live = least(count, most(p->max_len - begin, 0)), known = p->known[row];
    out->key_starts[r] = count > 0 && p->filled[row] < begin ? begin : p->valid_from[row];
    out->lengths[r] = live > 0 ? begin + live : 0;
    out->live[r] = live;
    out->key_starts32[r] = (int32_t)out->key_starts[r];
    out->lengths32[r] = (int32_t)out->lengths[r];
    out->live32[r] = (int32_t)live;
    out->temperature[r] = p->temperature[row];
    out->seed[r] = p->seed[row];
    out->sample_index[r] = p->sample_index[row];
    out->counts[r] = least(most(p->max_len - known, 0), p->num_wanted);
    out->last[r] = most(p->query_starts[r] + count - 1, 0);
    for (int64_t i = 0; i < p->num_wanted; i++) out->draft_positions[i * p->requests + r] = known + i;
    for (int64_t i = 0; i + 1 < p->num_wanted; i++) {
        int64_t at = i * p->requests + r, is_live = p->goes_on[r] && known + i < p->max_len;
        out->further_positions[at] = most(least(known + i, p->max_len - 1), 0);
        out->further_live[at] = is_live;
        out->further_lengths[at] = is_live ? out->further_positions[at] + 1 : 0;
        out->further_live32[at] = (int32_t)is_live;
        out->further_lengths32[at] = (int32_t)out->further_lengths[at];
    }
}

/* Returns 0 if a position lies outside of the rows or behind a page table. */
static int plan_token(const DraftPlan *p, const DraftTable *tables, const PlannedPasses *out, int64_t t) {
    int64_t r = p->request_of[t], offset = t - p->query_starts[r], live = out->live[r], first;
    int64_t position = p->computed_before[r] + 1 + least(offset, most(live - 1, 0));
    int is_live = offset < live;
    out->positions[t] = position = least(position, p->max_len - 1);
    if (position < 0 || position >= p->length) return 0;
    out->tokens[t] = is_live ? p->row_tokens[p->rows[r] * p->token_stride + position] : 0;
    out->tail_page[t] = ended_page(p, tables + p->tail_group, t, &first);
    for (int64_t g = 0; g < p->groups; g++)
        if (!find_slot(tables + g, r, position, is_live, tables[g].slots + t)) return 0;
    return 1;
}

int plan_draft_passes(const DraftPlan *p, const DraftTable *tables, const PlannedPasses *out) {
    if (!has_rows(p)) return 1;
    for (int64_t r = 0; r < p->requests; r++) plan_request(p, out, r);
    for (int64_t t = 0; t < p->tokens; t++)
        if (!plan_token(p, tables, out, t)) return 2;
    for (int64_t g = 0; g < p->groups; g++)
        for (int64_t at = 0; at < (p->num_wanted - 1) * p->requests; at++)
            if (!find_slot(tables + g, at % p->requests, out->further_positions[at], (int)out->further_live[at],
                           tables[g].further_slots + at))
                return 2;
    if (!mark_pages(p, tables, out->key_starts)) return 1;
    for (int64_t r = 0; r < p->requests; r++) { /* last, since padded requests share a row */
        p->valid_from[p->rows[r]] = out->key_starts[r];
        if (p->num_computed[r] > 0) p->filled[p->rows[r]] = p->computed_before[r] + 1 + p->num_computed[r];
    }
    return 0;
}

/* Returns 0, or 1 if a row, a request or a page is out of range. */
int forget_pages(const DraftPlan *p, const DraftTable *tables) {
    return has_rows(p) && mark_pages(p, tables, NULL) ? 0 : 1;
}
