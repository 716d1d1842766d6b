/* Products with token rows rounded to 8 bits, to the bits of int8.c, by AVX-512 and its dot products (VNNI).
 *
 * Weights are interleaved: a register holds four numbers of each of 16 weight rows, and meets the same four inputs of
 * one token row in all lanes. A lane is a weight row, so nothing is added across lanes, and scales are converted 16 at
 * a time: a block of 32 weights takes about a third of the instructions that it takes as it lies in a file.
 */
#include "native.h"
#include <float.h>

#define BLOCK 32
#define LANES 16     /* weight rows side by side */
#define ROWS 8       /* most token rows of a tile */
#define PIECE 32     /* weight rows that a thread takes at once */
#define FETCHED 2560 /* bytes between the weights that are read and those that are fetched */

INLINE int block_bytes(const int kind) { return kind == LANES_Q8_0 ? 34 : kind == LANES_Q4_0 ? 18 : 20; }
INLINE int head_bytes(const int kind) { return kind == LANES_Q4_1 ? 4 : 2; }

/* From rows of blocks to interleaved ones, in as many bytes, with the outputs filled up with zeros to whole lanes. For
 * each 16 weight rows and each block of them: the 16 scales, in Q4_1 the 16 minima, then of each weight row in turn its
 * first four bytes of numbers, of each its next four, and so on. `to` has the kind, and room for it. */
void interleave(const uint8_t *rows, const Matrix *to, int threads) {
    const int kind = (int)to->kind, bytes = block_bytes(kind), head = head_bytes(kind), fours = (bytes - head) / 4;
    const int64_t blocks = to->inputs / BLOCK, groups = (to->outputs + LANES - 1) / LANES;
    PARALLEL(threads) {
#pragma omp for
        for (int64_t i = 0; i < groups * blocks; i++) {
            uint8_t *out = (uint8_t *)to->data + i * LANES * bytes;
            for (int64_t lane = 0, o = i / blocks * LANES; lane < LANES; lane++, o++) {
                static const uint8_t none[34];
                const uint8_t *from = o < to->outputs ? rows + o * blocks * bytes + i % blocks * bytes : none;
                for (int h = 0; h < head / 2; h++) memcpy(out + 2 * (h * LANES + lane), from + 2 * h, 2);
                for (int f = 0; f < fours; f++)
                    memcpy(out + head * LANES + 4 * (f * LANES + lane), from + head + 4 * f, 4);
            }
        }
    }
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
/* How many weight rows are interleaved here; 0 where they are not. */
int64_t interleaved_rows(void) { return LANES; }

/* 32 inputs of a token row: round(input / scale), the sum of what these stand for, and what must be added to a sum of
 * products with numbers that are raised by 128. */
typedef struct {
    int8_t q[BLOCK];
    float scale, sum;
    int32_t raised;
} Inputs;

typedef struct {
    Matrix w;
    const Inputs *x; /* [tokens, blocks] */
    float *y;
    int64_t blocks;
} Product;

/* As in int8.c: the scale is NaN where an input is NaN, and where no float32 number is 127 / largest, the inputs count
 * for zero. */
INLINE void round_inputs(const float *x, Inputs *out) {
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
    __m512i low_size = _mm512_and_si512(_mm512_castps_si512(low), size);
    __m512i high_size = _mm512_and_si512(_mm512_castps_si512(high), size);
    int most = _mm512_reduce_max_epi32(_mm512_max_epi32(low_size, high_size));
    float largest;
    memcpy(&largest, &most, sizeof largest);
    float inverse = 127.0f / largest;
    if (!(inverse <= FLT_MAX)) inverse = 0.0f;
    __m512i low_whole = _mm512_cvtps_epi32(_mm512_mul_ps(low, _mm512_set1_ps(inverse)));
    __m512i high_whole = _mm512_cvtps_epi32(_mm512_mul_ps(high, _mm512_set1_ps(inverse)));
    _mm_storeu_si128((__m128i *)out->q, _mm512_cvtepi32_epi8(low_whole));
    _mm_storeu_si128((__m128i *)(out->q + 16), _mm512_cvtepi32_epi8(high_whole));
    int sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low_whole, high_whole));
    out->scale = largest / 127.0f;
    out->sum = out->scale * (float)sum;
    out->raised = -128 * sum;
}

/* The same block of 16 weight rows: 32 numbers of each, the scales, and what is added to each scaled number. All
 * numbers are positive: those of Q8_0 are raised by 128. */
typedef struct {
    __m512i numbers[BLOCK / 4];
    __m512 scale, least;
} Weights;

INLINE __m512 floats_of(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

INLINE Weights open_block(const uint8_t *at, const int kind) {
    const __m512i mask = _mm512_set1_epi8(15), raised = _mm512_set1_epi8((char)128);
    const uint8_t *numbers = at + head_bytes(kind) * LANES;
    Weights w;
    w.scale = floats_of(at);
    w.least = kind == LANES_Q4_1 ? floats_of(at + 2 * LANES) : _mm512_mul_ps(w.scale, _mm512_set1_ps(-8.0f));
    UNROLL for (int g = 0; g < BLOCK / 4; g++)
        if (kind == LANES_Q8_0) {
            w.numbers[g] = _mm512_xor_si512(_mm512_loadu_si512(numbers + 64 * g), raised);
        } else { /* the lower bits of 16 bytes of each weight row, then the upper ones */
            __m512i both = _mm512_loadu_si512(numbers + 64 * (g % 4));
            w.numbers[g] = _mm512_and_si512(g < 4 ? both : _mm512_srli_epi16(both, 4), mask);
        }
    return w;
}

INLINE __m512i repeated(const int8_t *at) {
    int four;
    memcpy(&four, at, 4);
    return _mm512_set1_epi32(four);
}

/* 16 weight rows, from o on, with `rows` token rows, from t on. */
INLINE void tile(const Product *p, int64_t t, int64_t o, const int rows, const int kind) {
    const Matrix *m = &p->w;
    const int size = LANES * block_bytes(kind);
    const uint8_t *at = (const uint8_t *)m->data + o / LANES * p->blocks * size;
    const Inputs *x = p->x + t * p->blocks;
    __m512 sums[ROWS];
    UNROLL for (int r = 0; r < rows; r++) sums[r] = _mm512_setzero_ps();
    for (int64_t b = 0; b < p->blocks; b++, x++, at += size) {
        UNROLL for (int line = 0; line < size / 64; line++) __builtin_prefetch(at + FETCHED + 64 * line);
        Weights w = open_block(at, kind);
        __m512i dots[ROWS];
        UNROLL for (int r = 0; r < rows; r++)
            dots[r] = kind == LANES_Q8_0 ? _mm512_set1_epi32(x[r * p->blocks].raised) : _mm512_setzero_si512();
        UNROLL for (int g = 0; g < BLOCK / 4; g++) /* the rows in turns: one row's sums wait for each other */
            UNROLL for (int r = 0; r < rows; r++)
                dots[r] = _mm512_dpbusd_epi32(dots[r], w.numbers[g], repeated(x[r * p->blocks].q + 4 * g));
        UNROLL for (int r = 0; r < rows; r++) {
            const Inputs *in = x + r * p->blocks;
            __m512 scale = _mm512_mul_ps(w.scale, _mm512_set1_ps(in->scale));
            sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r]), scale, sums[r]);
            if (kind != LANES_Q8_0) sums[r] = _mm512_fmadd_ps(w.least, _mm512_set1_ps(in->sum), sums[r]);
        }
    }
    const __mmask16 there = (__mmask16)(m->outputs - o < LANES ? (1 << (m->outputs - o)) - 1 : 0xffff);
    __m512 bias = m->bias ? _mm512_maskz_loadu_ps(there, m->bias + o) : _mm512_setzero_ps();
    UNROLL for (int r = 0; r < rows; r++)
        _mm512_mask_storeu_ps(p->y + (t + r) * m->outputs + o, there, _mm512_add_ps(sums[r], bias));
}

/* Functions of their own: inlined into one, they would take the registers from each other. */
typedef void Tile(const Product *, int64_t, int64_t);
#define TILE(name, rows, kind)                                                                                         \
    static __attribute__((noinline)) void name(const Product *p, int64_t t, int64_t o) { tile(p, t, o, rows, kind); }
#define TILES(kind)                                                                                                    \
    TILE(one_##kind, 1, kind) TILE(two_##kind, 2, kind) TILE(four_##kind, 4, kind) TILE(eight_##kind, 8, kind)         \
    static Tile *const kind##_TILES[] = {one_##kind, two_##kind, four_##kind, eight_##kind};
TILES(LANES_Q8_0)
TILES(LANES_Q4_0)
TILES(LANES_Q4_1)

static _Thread_local void *kept_inputs;
static _Thread_local size_t inputs_size;

static void multiply(const Product *p, int64_t tokens, int64_t from, int64_t to) {
    Tile *const *tiles = p->w.kind == LANES_Q8_0   ? LANES_Q8_0_TILES
                         : p->w.kind == LANES_Q4_0 ? LANES_Q4_0_TILES
                                                   : LANES_Q4_1_TILES;
    for (int64_t o = from; o < to; o += LANES) {
        int64_t t = 0;
        for (; t + 8 <= tokens; t += 8) tiles[3](p, t, o);
        if (t + 4 <= tokens) tiles[2](p, t, o), t += 4;
        if (t + 2 <= tokens) tiles[1](p, t, o), t += 2;
        if (t < tokens) tiles[0](p, t, o);
    }
}

/* Each thread rounds the token rows for itself, so that none waits for them. */
void share_lanes_product(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens,
                         const Gates *gates, Team *team) {
    int64_t blocks = w->inputs / BLOCK;
    Inputs *inputs = kept(&kept_inputs, &inputs_size, blocks * tokens * sizeof(Inputs));
    if (!inputs) abort(); /* nothing would run on without so little */
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t b = 0; b < blocks; b++) round_inputs(x + t * x_stride + b * BLOCK, inputs + t * blocks + b);
    Product p = {*w, inputs, y, blocks};
    const int64_t outputs = gates ? gates->width : w->outputs;
    Loop loop = start_loop(team, (outputs + PIECE - 1) / PIECE);
    for (int64_t i; (i = next_piece(&loop)) >= 0;) {
        int64_t from = i * PIECE, to = outputs - from < PIECE ? outputs : from + PIECE;
        multiply(&p, tokens, from, to);
        if (!gates) continue;
        multiply(&p, tokens, outputs + from, outputs + to);
        apply_gates(gates, y, w->outputs, 0, tokens, from, to);
    }
    meet(team);
}
#else
int64_t interleaved_rows(void) { return 0; }

/* Without these instructions no matrix is interleaved, so this is never called. */
void share_lanes_product(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens,
                         const Gates *gates, Team *team) {
    (void)w, (void)x, (void)x_stride, (void)y, (void)tokens, (void)gates, (void)team;
    abort();
}
#endif
