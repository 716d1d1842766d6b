/* Four weight rows with token rows rounded to 8 bits, by AVX2 and, where there are, the dot products of AVX-512 VNNI:
 * included by int8.c alone. */
#pragma once

typedef float Four __attribute__((vector_size(16)));

INLINE Four fused_four(Four a, Four b, Four c) { return (Four)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c); }
INLINE Four load_four(const float *at) { return (Four)_mm_loadu_ps(at); }

/* The same block of four weight rows: 32 numbers of each, the scales, and what is added to each scaled number. */
typedef struct {
    __m256i numbers[COLS];
    Four scale, least;
} Weights8;

INLINE int head_of(const uint8_t *at) {
    int head;
    memcpy(&head, at, 4);
    return head;
}

INLINE Weights8 open_blocks(const uint8_t *const *at, const int kind) {
    const __m256i shifts = _mm256_set_epi32(4, 4, 4, 4, 0, 0, 0, 0), mask = _mm256_set1_epi8(15);
    Weights8 w;
    UNROLL for (int c = 0; c < COLS; c++) {
        const uint8_t *first = at[c] + (kind == INT8_Q4_1 ? 4 : 2);
        if (kind == INT8_Q8_0) {
            w.numbers[c] = _mm256_loadu_si256((const __m256i *)first);
        } else { /* the lower bits of 16 bytes, then the upper ones */
            __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)first));
            w.numbers[c] = _mm256_and_si256(_mm256_srlv_epi32(twice, shifts), mask);
        }
    }
    /* Of each weight row a scale and, in Q4_1, a minimum; then four scales and four minima. */
    __m128i heads = _mm_set_epi32(head_of(at[3]), head_of(at[2]), head_of(at[1]), head_of(at[0]));
    heads = _mm_shuffle_epi8(heads, _mm_set_epi8(15, 14, 11, 10, 7, 6, 3, 2, 13, 12, 9, 8, 5, 4, 1, 0));
    __m256 both = _mm256_cvtph_ps(heads);
    w.scale = (Four)_mm256_castps256_ps128(both);
    w.least = kind == INT8_Q4_1 ? (Four)_mm256_extractf128_ps(both, 1) : w.scale * -8.0f;
    return w;
}

/* sums plus the products of a and b, four neighbours added up: a is within 0 and 128, b within -127 and 127. */
INLINE __m256i add_fours(__m256i sums, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(sums, a, b);
#else
    __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)); /* no sum is cut off */
    return _mm256_add_epi32(sums, fours);
#endif
}

/* The same where a may be negative, as the numbers of Q8_0 are. */
INLINE __m256i add_signed(__m256i sums, __m256i a, __m256i b, const int kind) {
    if (kind != INT8_Q8_0) return add_fours(sums, a, b);
    return add_fours(sums, _mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
}

INLINE Four halves_added(__m256i sums) {
    __m128i all = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return (Four)_mm_cvtepi32_ps(all);
}

INLINE Four dots(const Weights8 *w, const Inputs *x, const int kind) {
    __m256i inputs = _mm256_loadu_si256((const __m256i *)x->q), sums[COLS];
    UNROLL for (int c = 0; c < COLS; c++)
        sums[c] = add_signed(_mm256_setzero_si256(), w->numbers[c], inputs, kind);
    return halves_added(_mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3])));
}

/* The weight rows with four token rows: four numbers of a weight row at a time for all of them, and the next four. */
INLINE void dots_of_four(const Weights8 *w, const Inputs4 *x, Four *out, const int kind) {
    UNROLL for (int c = 0; c < COLS; c++) {
        __m256i sums = _mm256_setzero_si256();
        UNROLL for (int g = 0; g < BLOCK / 4; g += 2) {
            const __m256i both = _mm256_set_epi32(g + 1, g + 1, g + 1, g + 1, g, g, g, g);
            __m256i inputs = _mm256_loadu_si256((const __m256i *)x->q[g]);
            sums = add_signed(sums, _mm256_permutevar8x32_epi32(w->numbers[c], both), inputs, kind);
        }
        out[c] = halves_added(sums);
    }
}
