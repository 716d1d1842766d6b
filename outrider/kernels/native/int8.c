/* Products with weights in GGUF's bits and token rows rounded to 8 bits, a scale for every 32 inputs.
 *
 * The products of a block are summed in integers, exactly; blocks are added up in float32, from first to last. So
 * rounding the token rows is the only loss, and every machine gives nearly the same numbers.
 */
#include "native.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define BLOCK 32
#define COLS 4 /* weight rows of a tile: their sums of one block are one vector of four lanes */
#define ROWS 8 /* most token rows of a tile */

/* 32 inputs of a token row: round(input / scale), and the sum of what these stand for. */
typedef struct {
    int8_t q[BLOCK];
    float scale, sum;
} Inputs;

/* The same 32 inputs of four token rows, four inputs of each in turn. */
typedef struct {
    int8_t q[BLOCK / 4][4][4];
    float scale[4], sum[4];
} Inputs4;

typedef struct {
    Matrix w;
    const Inputs4 *quads; /* [tokens / 4, blocks] */
    const Inputs *x;      /* [tokens % 4, blocks] */
    float *y;
    int64_t blocks, tokens;
} Product8;

static void round_inputs(const float *x, Inputs *out) {
    float largest = 0;
    for (int i = 0; i < BLOCK; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    int sum = 0;
    for (int i = 0; i < BLOCK; i++) {
        out->q[i] = (int8_t)nearbyintf(x[i] * inverse);
        sum += out->q[i];
    }
    out->scale = largest / 127.0f;
    out->sum = out->scale * (float)sum;
}

static void round_four(const float *x, int64_t stride, Inputs4 *out) {
    for (int r = 0; r < 4; r++) {
        Inputs one;
        round_inputs(x + r * stride, &one);
        for (int i = 0; i < BLOCK; i++) out->q[i / 4][r][i % 4] = one.q[i];
        out->scale[r] = one.scale, out->sum[r] = one.sum;
    }
}

INLINE int block_bytes(const int kind) { return kind == INT8_Q8_0 ? 34 : kind == INT8_Q4_0 ? 18 : 20; }

#if defined(__ARM_FEATURE_DOTPROD)
typedef float32x4_t Four;

INLINE Four fused_four(Four a, Four b, Four c) { return vfmaq_f32(c, a, b); }

/* The same block of four weight rows: 32 numbers of each, the scales, and what is added to each scaled number. */
typedef struct {
    int8x16_t low[COLS], high[COLS];
    Four scale, least;
} Weights8;

INLINE Weights8 open_blocks(const uint8_t *const *at, const int kind) {
    Weights8 w;
    float16_t pairs[2 * COLS]; /* a scale and, in Q4_1, a minimum of each weight row */
    for (int c = 0; c < COLS; c++) {
        memcpy(pairs + 2 * c, at[c], 4);
        uint8x16_t first = vld1q_u8(at[c] + (kind == INT8_Q4_1 ? 4 : 2));
        if (kind == INT8_Q8_0) {
            w.low[c] = vreinterpretq_s8_u8(first), w.high[c] = vld1q_s8((const int8_t *)at[c] + 18);
        } else {
            w.low[c] = vreinterpretq_s8_u8(vandq_u8(first, vdupq_n_u8(15)));
            w.high[c] = vreinterpretq_s8_u8(vshrq_n_u8(first, 4));
        }
    }
    float16x4x2_t parts = vld2_f16(pairs);
    w.scale = vcvt_f32_f16(parts.val[0]);
    w.least = kind == INT8_Q4_1 ? vcvt_f32_f16(parts.val[1]) : vmulq_n_f32(w.scale, -8.0f);
    return w;
}

INLINE Four dots(const Weights8 *w, const Inputs *x) {
    int8x16_t low = vld1q_s8(x->q), high = vld1q_s8(x->q + 16);
    int32x4_t sums[COLS];
    UNROLL for (int c = 0; c < COLS; c++)
        sums[c] = vdotq_s32(vdotq_s32(vdupq_n_s32(0), w->low[c], low), w->high[c], high);
    return vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3])));
}
INLINE Four load_four(const float *at) { return vld1q_f32(at); }

/* Weight row c with four token rows. Sums begin at a number whose bits, read as a float, are those of 3 * 2^22 plus the
 * sum: to take that away is quicker than to convert an integer. */
INLINE Four dots_of_four(const Weights8 *w, const int c, const Inputs4 *x) {
    int32x4_t sum = vreinterpretq_s32_f32(vdupq_n_f32(0x1.8p23f));
#define LANE(part, first, lane) sum = vdotq_laneq_s32(sum, vld1q_s8(x->q[first + lane][0]), part[c], lane)
    LANE(w->low, 0, 0), LANE(w->low, 0, 1), LANE(w->low, 0, 2), LANE(w->low, 0, 3);
    LANE(w->high, 4, 0), LANE(w->high, 4, 1), LANE(w->high, 4, 2), LANE(w->high, 4, 3);
#undef LANE
    return vreinterpretq_f32_s32(sum) - 0x1.8p23f;
}
#else
typedef float Four __attribute__((vector_size(16)));

INLINE Four fused_four(Four a, Four b, Four c) {
    Four out;
    UNROLL for (int i = 0; i < 4; i++) out[i] = fmaf(a[i], b[i], c[i]);
    return out;
}

typedef struct {
    int8_t numbers[COLS][BLOCK];
    Four scale, least;
} Weights8;

INLINE float float16(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    uint32_t wide = (uint32_t)(bits & 0x7fff) << 13;
    float size;
    memcpy(&size, &wide, 4);
    size *= 0x1p112f; /* rebiases the exponent, exactly */
    return bits & 0x8000 ? -size : size;
}

INLINE Weights8 open_blocks(const uint8_t *const *at, const int kind) {
    Weights8 w;
    for (int c = 0; c < COLS; c++) {
        const uint8_t *first = at[c] + (kind == INT8_Q4_1 ? 4 : 2);
        if (kind == INT8_Q8_0)
            memcpy(w.numbers[c], first, BLOCK);
        else
            for (int i = 0; i < BLOCK / 2; i++)
                w.numbers[c][i] = first[i] & 15, w.numbers[c][i + BLOCK / 2] = first[i] >> 4;
        w.scale[c] = float16(at[c]);
        w.least[c] = kind == INT8_Q4_1 ? float16(at[c] + 2) : w.scale[c] * -8.0f;
    }
    return w;
}

/* Both are within -128 and 127, and the token row's numbers within -127 and 127: no sum of two is cut off. */
INLINE int dot(const int8_t *w, const int8_t *x) {
#if defined(__AVX2__)
    __m256i a = _mm256_loadu_si256((const __m256i *)w), b = _mm256_loadu_si256((const __m256i *)x);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
    __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
#else
    int sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += w[i] * x[i];
    return sum;
#endif
}

INLINE Four dots(const Weights8 *w, const Inputs *x) {
    Four out;
    UNROLL for (int c = 0; c < COLS; c++) out[c] = (float)dot(w->numbers[c], x->q);
    return out;
}

INLINE Four load_four(const float *at) {
    Four out;
    memcpy(&out, at, sizeof out);
    return out;
}

/* Weight row c with four token rows. */
INLINE Four dots_of_four(const Weights8 *w, const int c, const Inputs4 *x) {
    const int8_t *numbers = w->numbers[c];
#if defined(__AVX2__)
    __m256i sums = _mm256_setzero_si256();
    UNROLL for (int g = 0; g < BLOCK / 4; g += 2) { /* four inputs of each token row, then the next four */
        int32_t first, second;
        memcpy(&first, numbers + 4 * g, 4), memcpy(&second, numbers + 4 * g + 4, 4);
        __m256i a = _mm256_set_m128i(_mm_set1_epi32(second), _mm_set1_epi32(first));
        __m256i b = _mm256_loadu_si256((const __m256i *)x->q[g]);
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return (Four)_mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)));
#else
    int sums[4] = {0};
    for (int g = 0; g < BLOCK / 4; g++)
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < 4; i++) sums[r] += numbers[4 * g + i] * x->q[g][r][i];
    return (Four){(float)sums[0], (float)sums[1], (float)sums[2], (float)sums[3]};
#endif
}
#endif

/* The weight rows of a tile. A missing one is the last one again. */
INLINE void find_rows(const Matrix *m, int64_t o, const uint8_t **at) {
    for (int c = 0; c < COLS; c++)
        at[c] = (const uint8_t *)m->data + (o + c < m->outputs ? o + c : m->outputs - 1) * m->row_bytes;
}

INLINE void next_blocks(const Matrix *m, const uint8_t **at, const int kind) {
    UNROLL for (int c = 0; c < COLS; c++) {
        at[c] += block_bytes(kind);
        __builtin_prefetch(at[c] + COLS * m->row_bytes);
    }
}

/* Four weight rows, from o on, with `rows` token rows, from t on, that are not in fours. */
INLINE void tile(const Product8 *p, int64_t t, int64_t o, const int rows, const int kind) {
    const Matrix *m = &p->w;
    int64_t first = p->tokens / 4 * 4;
    const uint8_t *at[COLS];
    find_rows(m, o, at);
    Four sums[ROWS];
    UNROLL for (int r = 0; r < rows; r++) sums[r] = (Four){0};
    for (int64_t b = 0; b < p->blocks; b++) {
        Weights8 w = open_blocks(at, kind);
        UNROLL for (int r = 0; r < rows; r++) {
            const Inputs *x = p->x + (t + r - first) * p->blocks + b;
            sums[r] = fused_four(dots(&w, x), w.scale * x->scale, sums[r]);
            if (kind != INT8_Q8_0) sums[r] = fused_four(w.least, x->sum - (Four){0}, sums[r]);
        }
        next_blocks(m, at, kind);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLS && o + c < m->outputs; c++)
            p->y[(t + r) * m->outputs + o + c] = sums[r][c] + (m->bias ? m->bias[o + c] : 0.0f);
}

/* Four weight rows, from o on, with `fours` times four token rows, from t on. A lane is a token row here, so that sums
 * need no adding across lanes; each is rounded and added up as in `tile`, to the same bits. */
INLINE void tile_fours(const Product8 *p, int64_t t, int64_t o, const int fours, const int kind) {
    const Matrix *m = &p->w;
    const uint8_t *at[COLS];
    find_rows(m, o, at);
    Four sums[COLS][2];
    UNROLL for (int c = 0; c < COLS; c++) UNROLL for (int f = 0; f < fours; f++) sums[c][f] = (Four){0};
    for (int64_t b = 0; b < p->blocks; b++) {
        Weights8 w = open_blocks(at, kind);
        UNROLL for (int c = 0; c < COLS; c++) UNROLL for (int f = 0; f < fours; f++) {
            const Inputs4 *x = p->quads + (t / 4 + f) * p->blocks + b;
            Four scale = load_four(x->scale) * w.scale[c];
            sums[c][f] = fused_four(dots_of_four(&w, c, x), scale, sums[c][f]);
            if (kind != INT8_Q8_0) sums[c][f] = fused_four(w.least[c] - (Four){0}, load_four(x->sum), sums[c][f]);
        }
        next_blocks(m, at, kind);
    }
    for (int f = 0; f < fours; f++)
        for (int r = 0; r < 4; r++)
            for (int c = 0; c < COLS && o + c < m->outputs; c++)
                p->y[(t + 4 * f + r) * m->outputs + o + c] = sums[c][f][r] + (m->bias ? m->bias[o + c] : 0.0f);
}

/* All token rows by tiles of eight, four, two and one: code for every number would take long to compile. */
INLINE void tiles(const Product8 *p, int64_t o, const int kind) {
    int64_t t = 0;
    for (; t + 8 <= p->tokens; t += 8) tile_fours(p, t, o, 2, kind);
    if (t + 4 <= p->tokens) tile_fours(p, t, o, 1, kind), t += 4;
    if (t + 2 <= p->tokens) tile(p, t, o, 2, kind), t += 2;
    if (t < p->tokens) tile(p, t, o, 1, kind);
}

static _Thread_local void *kept_inputs;
static _Thread_local size_t inputs_size;

/* Token rows are rounded and multiplied so many at a time: that many stay in a core's cache. */
#define SLICE8 64

/* Each thread rounds the token rows for itself, so that none waits for them. */
static void share_int8_slice(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens) {
    int64_t blocks = w->inputs / BLOCK, fours = tokens / 4, rest = tokens % 4;
    Inputs4 *quads = kept(&kept_inputs, &inputs_size, blocks * (fours * sizeof(Inputs4) + rest * sizeof(Inputs)));
    if (!quads) abort(); /* nothing would run on without so little */
    Inputs *ones = (Inputs *)(quads + fours * blocks);
    for (int64_t t = 0; t < fours; t++)
        for (int64_t b = 0; b < blocks; b++)
            round_four(x + 4 * t * x_stride + b * BLOCK, x_stride, quads + t * blocks + b);
    for (int64_t t = 0; t < rest; t++)
        for (int64_t b = 0; b < blocks; b++)
            round_inputs(x + (4 * fours + t) * x_stride + b * BLOCK, ones + t * blocks + b);
    Product8 p = {*w, quads, ones, y, blocks, tokens};
#pragma omp for schedule(dynamic, 12)
    for (int64_t o = 0; o < w->outputs; o += COLS) switch (w->kind) {
        case INT8_Q8_0: tiles(&p, o, INT8_Q8_0); break;
        case INT8_Q4_0: tiles(&p, o, INT8_Q4_0); break;
        default: tiles(&p, o, INT8_Q4_1);
        }
}

void share_int8_product(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t += SLICE8)
        share_int8_slice(w, x + t * x_stride, x_stride, y + t * w->outputs, tokens - t < SLICE8 ? tokens - t : SLICE8);
}
