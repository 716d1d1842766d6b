/* The draw: a scaled logit with Gumbel noise, which lane t % 4 of Philox 4x32-10 gives for token t. The words are those
 * of sample/philox.py bit for bit. Noise is computed by double logarithms, each rounded to float, one token at a time:
 * hardly any token comes into question, because a bound of its score by the exponent of its word already tells.
 */
#include "sampling.h"

#define MULTIPLIER_0 0xD2511F53u
#define MULTIPLIER_1 0xCD9E8D57u
#define KEY_STEP_0 0x9E3779B9u
#define KEY_STEP_1 0xBB67AE85u
#define ROUNDS 10
#define CHAINS (GROUP / (4 * VL) > 1 ? 2 : 1)
#define LOG_2 0.6931475f /* more than the logarithm of 2, and than any rounding of a multiple of it */
#define MOST_NOISE (33 * LOG_2)
#define LARGEST_BELOW_ONE 0.99999994f

/* The halves of 32 x 32 bit products. */
INLINE void multiply_wide(vu x, uint32_t factor, vu *high, vu *low) {
#if defined(__AVX512F__)
    const __m512i by = _mm512_set1_epi32((int)factor), own = (__m512i)x;
    __m512i even = _mm512_mul_epu32(own, by), odd = _mm512_mul_epu32(_mm512_srli_epi64(own, 32), by);
    *high = (vu)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
    *low = (vu)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
#elif defined(__AVX2__)
    const __m256i by = _mm256_set1_epi32((int)factor), own = (__m256i)x;
    __m256i even = _mm256_mul_epu32(own, by), odd = _mm256_mul_epu32(_mm256_srli_epi64(own, 32), by);
    *high = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    *low = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
#elif defined(__aarch64__)
    const uint32x4_t own = (uint32x4_t)x;
    uint32x4_t first = (uint32x4_t)vmull_n_u32(vget_low_u32(own), factor);
    uint32x4_t second = (uint32x4_t)vmull_high_n_u32(own, factor);
    *high = (vu)vuzp2q_u32(first, second);
    *low = (vu)vuzp1q_u32(first, second);
#else
    for (int i = 0; i < VL; i++) {
        uint64_t product = (uint64_t)x[i] * factor;
        (*high)[i] = (uint32_t)(product >> 32), (*low)[i] = (uint32_t)product;
    }
#endif
}

/* The words of counters whose first words are in words[c][0], for `chains` of lanes together: a round of one waits for
 * the products of the round before. */
INLINE void mix_words(const LogitRow *r, vu (*words)[4], const int chains) {
    vu zero = {0};
    uint32_t k0 = r->key[0], k1 = r->key[1];
    UNROLL for (int c = 0; c < chains; c++)
        words[c][1] = zero + r->words[0], words[c][2] = zero + r->words[1], words[c][3] = zero;
    UNROLL for (int i = 0; i < ROUNDS; i++) {
        UNROLL for (int c = 0; c < chains; c++) {
            vu *own = words[c], high0, low0, high1, low1;
            multiply_wide(own[0], MULTIPLIER_0, &high0, &low0);
            multiply_wide(own[2], MULTIPLIER_1, &high1, &low1);
            own[0] = high1 ^ own[1] ^ k0, own[1] = low1, own[2] = high0 ^ own[3] ^ k1, own[3] = low0;
        }
        k0 += KEY_STEP_0, k1 += KEY_STEP_1;
    }
}

/* The words of quads of tokens from `quad` on: word j of lane i is that of token 4 (quad + i) + j. */
INLINE void philox(const LogitRow *r, uint32_t quad, vu (*words)[4], const int chains) {
    vu lane;
    for (int i = 0; i < VL; i++) lane[i] = (uint32_t)i;
    UNROLL for (int c = 0; c < chains; c++) words[c][0] = lane + (quad + (uint32_t)(c * VL));
    mix_words(r, words, chains);
}

/* From words by quads to words by tokens. */
INLINE void order_by_token(vu *words) {
    vu even_low = SHUFFLE(words[0], words[2], LOWS), even_high = SHUFFLE(words[0], words[2], HIGHS);
    vu odd_low = SHUFFLE(words[1], words[3], LOWS), odd_high = SHUFFLE(words[1], words[3], HIGHS);
    words[0] = SHUFFLE(even_low, odd_low, LOWS), words[1] = SHUFFLE(even_low, odd_low, HIGHS);
    words[2] = SHUFFLE(even_high, odd_high, LOWS), words[3] = SHUFFLE(even_high, odd_high, HIGHS);
}

/* Uniform numbers in (0, 1). */
INLINE vf uniforms(vu words) {
    vf u = (__builtin_convertvector(words, vf) + 0.5f) * 0x1p-32f;
    return pick(u > LARGEST_BELOW_ONE, splat(LARGEST_BELOW_ONE), u);
}

static float noise_of(uint32_t word) {
    float u = ((float)word + 0.5f) * 0x1p-32f;
    if (u > LARGEST_BELOW_ONE) u = LARGEST_BELOW_ONE;
    float exponential = -(float)log1p(-(double)u);
    return -(float)log((double)exponential);
}

/* The noise of one token. */
float gumbel_of(const LogitRow *r, int64_t token) {
    vu words[1][4];
    philox(r, (uint32_t)(token / 4), words, 1);
    return noise_of(words[0][token % 4][0]);
}

/* -log of a uniform number exceeds its noise, and -log of the power of two below it exceeds that. */
INLINE vf noise_bounds(vf uniform) {
    return __builtin_convertvector(127 - ((vi)uniform >> 23), vf) * LOG_2;
}

/* `slope` is a little less than 1 / temperature, so that what it gives is a little more than the scaled logit. */
INLINE void draw_lanes(const LogitRow *r, const float *own, int64_t first, float slope, vu *words, BlockWork *best) {
    vf bounds[4];
    vi is_open = {0};
    order_by_token(words);
    UNROLL for (int v = 0; v < 4; v++) {
        bounds[v] = (load(own + v * VL) - r->greatest) * slope + noise_bounds(uniforms(words[v]));
        is_open |= bounds[v] > best->score;
    }
    if (!any_lane(is_open)) return;
    for (int i = 0; i < 4 * VL; i++) {
        if (!(bounds[i / VL][i % VL] > best->score)) continue;
        float scaled = scaled_of(r, own[i]), score;
        if (scaled < scaled_at(r->furthest)) continue;
        score = scaled + noise_of(words[i / VL][i % VL]);
        if (score > best->score) best->score = score, best->token = first + i;
    }
}

/* Beats the block's score with a group's. */
static void draw_group(const LogitRow *r, const float *own, int64_t first, float slope, BlockWork *best) {
    for (int at = 0; at < GROUP; at += CHAINS * 4 * VL) {
        vu words[CHAINS][4];
        philox(r, (uint32_t)((first + at) / 4), words, CHAINS);
        for (int c = 0; c < CHAINS; c++)
            draw_lanes(r, own + at + c * 4 * VL, first + at + c * 4 * VL, slope, words[c], best);
    }
}

/* The best score of a block, the lowest token of equals; the row's bound if no token beats that. */
void draw_block(const Sampling *s, LogitRow *r, int64_t block) {
    BlockWork *best = r->blocks + block;
    float slope = 1.0f / r->temperature, room[GROUP];
    slope = (slope < 3e38f ? slope : 3e38f) * 0.999999f;
    best->score = r->bound;
    for (int64_t first = block * BLOCK; first < lower(block * BLOCK + BLOCK, s->in->vocab); first += GROUP) {
        float top = r->groups[first / GROUP];
        if (!((top - r->greatest) * slope + MOST_NOISE > best->score)) continue;
        if (scaled_of(r, top) < scaled_at(r->furthest)) continue;
        draw_group(r, load_group(r->logits, first, s->in->vocab, room), first, slope, best);
    }
}

int64_t draw_of_ids(const LogitRow *r, const float *logits, const int64_t *ids, int64_t from, int64_t to, float *score) {
    int64_t best = from;
    *score = -INFINITY;
    for (int64_t first = from; first < to; first += VL) {
        const int live = to - first < VL ? (int)(to - first) : VL;
        vf own = live == VL ? load(logits + first) : load_tail(logits + first, live);
        const vf scaled = own / r->temperature;
        if (!any_lane(scaled + MOST_NOISE > *score)) continue;
        vu words[1][4];
        for (int i = 0; i < VL; i++) {
            const int64_t at = i < live ? first + i : first;
            words[0][0][i] = (uint32_t)((ids ? ids[at] : at) / 4);
        }
        mix_words(r, words, 1);
        for (int i = 0; i < live; i++) {
            const int64_t token = ids ? ids[first + i] : first + i;
            const uint32_t word = words[0][token % 4][i];
            /* -log of the power of two below the uniform number exceeds its noise */
            if (scaled[i] + (float)(__builtin_clz(word | 1) + 1) * LOG_2 <= *score) continue;
            const float own_score = scaled[i] + noise_of(word);
            if (own_score > *score) *score = own_score, best = first + i;
        }
    }
    return best;
}
