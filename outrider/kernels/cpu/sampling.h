/* The sampler's parts: structs that Python packs (structures.py), the state of a logit row, and the noise.
 *
 * A vocabulary is cut into groups of 64 tokens, whose greatest logits tell which groups the later passes may skip, and
 * into blocks of groups, which threads share. Both are cut by the vocabulary alone, so that a logit row's token and
 * log-probabilities do not depend on the other rows or on the number of threads.
 */
#pragma once
#include "native.h"

#define GROUP 64
#define BLOCK 4096 /* tokens: a whole number of groups, and of words of 32 bits */
#define MOST_TOP 128 /* likeliest tokens that are reported: KERNEL_MAX_LOGPROBS in sample/logprobs.py */

/* Bits of a row's flags: kernels/sampling_flags.py. */
enum { ALLOWED = 1, BIAS = 2, BAD_WORDS = 4, MIN_TOKENS = 8, PENALTIES = 16, TOP_K = 32, TOP_P = 64, MIN_P = 128,
       MASKED = 256, EDITED = ALLOWED | BIAS | BAD_WORDS | MIN_TOKENS | PENALTIES | MASKED };
#define OUTPUTS ((1 << 30) - 1) /* of a row's count of a token: how often the outputs hold it */

/* The fields of all rows: sample/sampling_rows.py. A draw at a temperature reads the first three; `flags` is null. */
typedef struct {
    const float *temperature;
    const int64_t *seed, *sample_index;
    const int64_t *flags, *top_k, *min_tokens, *prompt_len, *num_stop_ids, *num_logprobs, *bias_start, *bias_len,
        *words_start, *num_words;
    const float *top_p, *min_p_floor, *presence, *frequency, *repetition;
    const int64_t *stop_ids;                            /* [rows, stop_stride] */
    const int32_t *lists, *allowed, *counts, *masks;    /* counts and masks are null until a request asks */
    int64_t rows, stop_stride, allowed_stride, count_stride, mask_stride, masks_per_row; /* mask_stride: of a mask */
} SamplingRows;

/* The logit rows of a step, and the text that they follow. */
typedef struct {
    const float *logits, *edited; /* [logit rows, vocab]; edited may be null: then the rows' lists are applied here */
    const int64_t *row, *position, *draft_index;
    const int64_t *tokens, *known, *drafts; /* of all rows */
    const int64_t *chosen; /* [logit rows] tokens that are reported, none is drawn then; null: the drawn ones */
    int64_t count, vocab, stride, edited_stride, token_stride, draft_stride, max_drafts;
    int64_t any_sampled;                    /* 0: all are greedy, whatever their temperatures */
    int64_t reports, is_processed, num_top; /* of log-probabilities */
} LogitRows;

typedef struct {
    int64_t *tokens; /* [logit rows] */
    uint8_t *bad;
    /* Of log-probabilities, written in logit rows that ask: */
    int64_t *ids;       /* [logit rows, 2 + num_top]: rank, token, likeliest tokens */
    float *values;      /* [logit rows, 1 + num_top] */
    float *most, *norm; /* [logit rows]: the log-probability of x is x - most - norm */
} SampledRows;

/* A block's part of the sums and of the choice. */
typedef struct {
    int64_t mass, token;
    float score, sum;
} BlockWork;

/* A logit row at work. Scaled logits are (logit - greatest) / temperature; a distance is what lies between one and 0, as
 * the bits of a float, which are ordered like the floats. */
typedef struct {
    const float *raw, *logits; /* the model's own; those that are drawn from */
    float *edited;             /* where `logits` are written, or null */
    float *raw_groups, *groups;
    BlockWork *blocks;
    int64_t of, flags, position, num_before, token;
    float raw_greatest, greatest, temperature, bound; /* bound: a score that is beaten */
    uint32_t furthest;                         /* distance up to which tokens are kept */
    uint32_t key[2], words[2];                 /* of the noise */
    int is_bad, is_drawn, is_weighed, is_reported;
} LogitRow;

/* All of a call; `rows` are those at work. */
typedef struct {
    const SamplingRows *state;
    const LogitRows *in;
    const SampledRows *out;
    LogitRow *rows;
    uint32_t *keys; /* [threads, vocab] */
    int64_t first, count, groups, blocks;
} Sampling;

INLINE int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE float scaled_of(const LogitRow *r, float logit) { return (logit - r->greatest) / r->temperature; }
INLINE uint32_t distance_of(const LogitRow *r, float logit) { return bits_of(scaled_of(r, logit)) & 0x7fffffff; }
INLINE float scaled_at(uint32_t distance) { return -float_of(distance); }

INLINE int any_lane(vi mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif defined(__aarch64__)
    return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
    int any = 0;
    for (int i = 0; i < VL; i++) any |= mask[i] != 0;
    return any;
#endif
}

/* The logits of a group, -inf behind the last token of the vocabulary: in place, or in `room` [GROUP]. */
INLINE const float *load_group(const float *logits, int64_t first, int64_t vocab, float *room) {
    if (first + GROUP <= vocab) return logits + first;
    for (int i = 0; i < GROUP; i++) room[i] = first + i < vocab ? logits[first + i] : -INFINITY;
    return room;
}

void edit_block(const Sampling *s, LogitRow *r, int64_t first, int64_t last);
int64_t weigh_block(const LogitRow *r, int64_t vocab, int64_t first_group, int64_t last_group);
uint32_t furthest_of_top_k(const Sampling *s, const LogitRow *r, uint32_t *keys);
uint32_t furthest_of_top_p(const Sampling *s, const LogitRow *r, int64_t total, uint32_t *keys);
float gumbel_of(const LogitRow *r, int64_t token);
/* The best of outputs [from, to) by scaled logit and the noise of its token, which `ids` names unless it is null; the
 * first of equals. Reads temperature, key and words of the row; writes the best score. */
int64_t draw_of_ids(const LogitRow *r, const float *logits, const int64_t *ids, int64_t from, int64_t to, float *score);
void draw_block(const Sampling *s, LogitRow *r, int64_t block);
void add_exponentials(const Sampling *s, LogitRow *r, int64_t block);
void report_row(const Sampling *s, const LogitRow *r, int64_t at);
void report_bad_row(const Sampling *s, const LogitRow *r, int64_t at);
