/* The sampler on the CPU: a token for every logit row, with any parameters, and log-probabilities. The meaning is
 * that of sample/sampler.py. A call goes through passes over the blocks of all logit rows, which threads share, and over
 * the rows between them:
 *
 *     survey   (blocks)  edits; the greatest logit of every group
 *     plan     (rows)    the greatest logit: the token of a greedy row; the distance that top-k keeps
 *     weigh    (blocks)  the mass of rows with a top-p and without a top-k; then (rows) the distance that top-p keeps
 *     draw     (blocks)  the best score; sums of exponentials for log-probabilities
 *     finish   (rows)    the token, its log-probability, the likeliest tokens
 *
 * Log-probabilities of given tokens, those of a prompt, go through the same passes, where none is drawn.
 */
#include "sampling.h"

#define WAVE (1 << 22) /* logits that are at work together, which bounds the memory */

/* The greatest logit of every group of a block; +inf where a group has a NaN, so that its row is found to be bad. */
static void survey(const float *x, int64_t vocab, int64_t first, int64_t last, float *groups) {
    for (int64_t at = first; at < last; at += GROUP) {
        float room[GROUP], most;
        const float *own = load_group(x, at, vocab, room);
        vf best = load(own);
        vi nan = best != best;
        UNROLL for (int i = VL; i < GROUP; i += VL) {
            vf each = load(own + i);
            nan |= each != each;
            best = vmax(each, best);
        }
        most = any_lane(nan) ? INFINITY : max_lanes(best);
        groups[at / GROUP] = most;
    }
}

static void survey_block(const Sampling *s, LogitRow *r, int64_t block) {
    int64_t first = block * BLOCK, last = lower(first + BLOCK, s->in->vocab);
    survey(r->raw, s->in->vocab, first, last, r->raw_groups);
    if (r->groups == r->raw_groups) return;
    if (r->edited) edit_block(s, r, first, last);
    survey(r->logits, s->in->vocab, first, last, r->groups);
}

static float greatest_of(const float *groups, int64_t count) {
    float greatest = groups[0];
    for (int64_t g = 1; g < count; g++) greatest = groups[g] > greatest ? groups[g] : greatest;
    return greatest;
}

/* The first token that has the greatest logit, which is there. */
static int64_t find_greatest(const LogitRow *r) {
    int64_t group = 0;
    while (r->groups[group] != r->greatest) group++;
    int64_t token = group * GROUP;
    while (r->logits[token] != r->greatest) token++;
    return token;
}

static void plan_row(const Sampling *s, LogitRow *r, uint32_t *keys) {
    r->raw_greatest = greatest_of(r->raw_groups, s->groups);
    r->greatest = r->groups == r->raw_groups ? r->raw_greatest : greatest_of(r->groups, s->groups);
    r->is_bad = !isfinite(r->raw_greatest) || !isfinite(r->greatest);
    if (r->is_bad) {
        r->is_drawn = r->is_weighed = r->is_reported = 0;
        return;
    }
    if (!s->in->chosen) r->token = find_greatest(r);
    if (!r->is_drawn) return;
    r->bound = nextafterf(gumbel_of(r, r->token), -INFINITY); /* the scaled logit of this token is 0 */
    if (r->flags & MIN_P) r->furthest = bits_of(s->state->min_p_floor[r->of]) & 0x7fffffff;
    if (r->flags & TOP_K) r->furthest = furthest_of_top_k(s, r, keys);
}

static void weigh_row(const Sampling *s, LogitRow *r, uint32_t *keys) {
    if (!r->is_weighed) return;
    int64_t total = 0;
    for (int64_t b = 0; b < s->blocks; b++) total += r->blocks[b].mass;
    r->furthest = furthest_of_top_p(s, r, total, keys);
}

static void finish_row(const Sampling *s, LogitRow *r, int64_t at) {
    float best = r->bound;
    for (int64_t b = 0; b < s->blocks && r->is_drawn; b++)
        if (r->blocks[b].score > best) best = r->blocks[b].score, r->token = r->blocks[b].token;
    s->out->bad[at] = (uint8_t)r->is_bad;
    s->out->tokens[at] = r->is_bad ? 0 : r->token;
    if (r->is_reported) report_row(s, r, at);
    else if (s->in->chosen) report_bad_row(s, r, at);
}

enum { SURVEY, WEIGH, DRAW };

static void work_on_block(const Sampling *s, LogitRow *r, int64_t block, int pass) {
    if (pass == SURVEY) survey_block(s, r, block);
    if (pass == WEIGH && r->is_weighed) {
        int64_t first = block * (BLOCK / GROUP);
        r->blocks[block].mass =
            weigh_block(r, s->in->vocab, first, lower(first + BLOCK / GROUP, s->groups));
    }
    if (pass == DRAW && r->is_drawn) draw_block(s, r, block);
    if (pass == DRAW && r->is_reported) add_exponentials(s, r, block);
}

static void pass_blocks(const Sampling *s, int pass, Team *team) {
    Loop loop = start_loop(team, s->count * s->blocks);
    for (int64_t piece; (piece = next_piece(&loop)) >= 0;)
        work_on_block(s, s->rows + piece / s->blocks, piece % s->blocks, pass);
    meet(team);
}

/* What follows a pass, row by row. */
static void pass_rows(const Sampling *s, int pass, Team *team) {
    Loop loop = start_loop(team, s->count);
    uint32_t *keys = s->keys + loop.self * s->in->vocab;
    for (int64_t row; (row = next_piece(&loop)) >= 0;) {
        if (pass == SURVEY) plan_row(s, s->rows + row, keys);
        if (pass == WEIGH) weigh_row(s, s->rows + row, keys);
        if (pass == DRAW) finish_row(s, s->rows + row, s->first + row);
    }
    meet(team);
}

/* What a call asks for as a whole, which decides on its passes and its memory. */
typedef struct {
    int edits, draws, weighs, searches, reports;
} Asked;

static Asked look_at_rows(const SamplingRows *state, const LogitRows *in) {
    Asked asked = {0};
    for (int64_t l = 0; l < in->count; l++) {
        int64_t of = in->row[l], flags = state->flags ? state->flags[of] : 0;
        int draws = in->any_sampled && state->temperature[of] > 0;
        asked.draws |= draws;
        asked.edits |= (flags & EDITED) != 0 && !in->edited;
        asked.searches |= draws && flags & (TOP_K | TOP_P);
        asked.weighs |= draws && (flags & (TOP_K | TOP_P)) == TOP_P;
        asked.reports |= in->reports && state->num_logprobs[of] >= -1;
    }
    return asked;
}

/* Memory of a wave of logit rows; `edited` is that of all of them, or null. */
typedef struct {
    LogitRow *rows;
    BlockWork *blocks;
    float *groups, *edited;
} WaveMemory;

static void start_row(const Sampling *s, int64_t index, const WaveMemory *memory) {
    const SamplingRows *state = s->state;
    const LogitRows *in = s->in;
    int64_t at = s->first + index, of = in->row[at], flags = state->flags ? state->flags[of] : 0;
    LogitRow *r = s->rows + index;
    int is_edited = (flags & EDITED) != 0;
    float *groups = memory->groups + 2 * index * s->groups;
    const float *raw = in->logits + at * in->stride;
    *r = (LogitRow){.raw = raw, .logits = raw, .raw_groups = groups, .groups = groups + is_edited * s->groups,
                    .blocks = memory->blocks + index * s->blocks, .of = of, .flags = flags,
                    .position = in->position ? in->position[at] : 0, .furthest = bits_of(INFINITY),
                    .temperature = state->temperature[of]};
    if (is_edited && in->edited) r->logits = in->edited + at * in->edited_stride;
    if (is_edited && !in->edited) r->logits = r->edited = memory->edited + index * in->vocab;
    if (is_edited) r->num_before = lower(in->draft_index[at], in->max_drafts);
    r->is_drawn = in->any_sampled && r->temperature > 0;
    if (!r->is_drawn) r->temperature = 1, r->flags &= EDITED;
    r->is_weighed = (r->flags & (TOP_K | TOP_P)) == TOP_P;
    r->is_reported = in->reports && state->num_logprobs[of] >= -1;
    if (in->chosen) r->token = in->chosen[at];
    if (!r->is_drawn) return;
    uint64_t seed = (uint64_t)state->seed[of];
    r->key[0] = (uint32_t)seed, r->key[1] = (uint32_t)(seed >> 32);
    r->words[0] = (uint32_t)r->position, r->words[1] = (uint32_t)state->sample_index[of];
}

static void sample_wave(const Sampling *s, Asked asked, int threads) {
    Team team = {.threads = threads};
    PARALLEL(threads) {
        pass_blocks(s, SURVEY, &team);
        pass_rows(s, SURVEY, &team);
        if (asked.weighs) {
            pass_blocks(s, WEIGH, &team);
            pass_rows(s, WEIGH, &team);
        }
        if (asked.draws || asked.reports) pass_blocks(s, DRAW, &team);
        pass_rows(s, DRAW, &team);
    }
}

static _Thread_local void *kept_wave;
static _Thread_local size_t wave_size;

/* Cuts the kept memory, or returns 0 if there is none. */
static int find_memory(Sampling *s, WaveMemory *memory, int64_t most_rows, Asked asked, int threads) {
    size_t rows = most_rows * sizeof(LogitRow), blocks = most_rows * s->blocks * sizeof(BlockWork);
    size_t groups = 2 * most_rows * s->groups * sizeof(float);
    size_t edited = asked.edits ? most_rows * s->in->vocab * sizeof(float) : 0;
    size_t keys = asked.searches ? threads * s->in->vocab * sizeof(uint32_t) : 0;
    char *place = kept(&kept_wave, &wave_size, rows + blocks + groups + edited + keys);
    if (!place) return 0;
    s->rows = memory->rows = (LogitRow *)place;
    memory->blocks = (BlockWork *)(place += rows);
    memory->groups = (float *)(place += blocks);
    memory->edited = (float *)(place += groups);
    s->keys = (uint32_t *)(place + edited);
    return 1;
}

/* Returns 0, or what is wrong: 1 a row out of range, 2 memory, 3 a chosen token out of range. */
int sample_rows(const SamplingRows *state, const LogitRows *in, const SampledRows *out, int threads) {
    if (in->count == 0) return 0; /* a step that computes no prompt to its end */
    for (int64_t l = 0; l < in->count; l++)
        if (in->row[l] < 0 || in->row[l] >= state->rows) return 1;
    for (int64_t l = 0; in->chosen && l < in->count; l++)
        if (in->chosen[l] < 0 || in->chosen[l] >= in->vocab) return 3;
    Asked asked = look_at_rows(state, in);
    int is_plain = !(asked.draws || asked.edits || asked.reports);
    if (in->count * in->vocab < (is_plain ? 131072 : 16384)) threads = 1;
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    Sampling s = {.state = state, .in = in, .out = out, .groups = (in->vocab + GROUP - 1) / GROUP,
                  .blocks = (in->vocab + BLOCK - 1) / BLOCK};
    int64_t most_rows = WAVE / in->vocab > 0 ? WAVE / in->vocab : 1;
    most_rows = lower(most_rows, in->count);
    WaveMemory memory;
    if (!find_memory(&s, &memory, most_rows, asked, threads)) return 2;
    for (; s.first < in->count; s.first += s.count) {
        s.count = lower(most_rows, in->count - s.first);
        for (int64_t i = 0; i < s.count; i++) start_row(&s, i, &memory);
        sample_wave(&s, asked, threads);
    }
    return 0;
}
