/* Products with weights in GGUF's bits and token rows rounded to 8 bits, a scale for every 32 inputs.
 *
 * The products of a block are summed in integers, exactly; blocks are added up in float32, from first to last. So
 * rounding the token rows is the only loss, and every machine gives nearly the same numbers.
 */
#include "native.h"
#include <float.h>

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

/* The scale is NaN where an input is NaN: as integers, sizes of numbers are in the order of the numbers, and NaN is the
 * largest. Where no float32 number is 127 / largest, the inputs count for zero. */
INLINE void round_inputs(const float *x, Inputs *out) {
    const vf bias = splat(0x1.8p23f); /* a number added to it is rounded to an integer, in the lowest bits */
    vi sizes = {0};
    UNROLL for (int i = 0; i < BLOCK; i += VL) {
        vi size = (vi)load(x + i) & 0x7fffffff, is_larger = size > sizes;
        sizes = (is_larger & size) | (~is_larger & sizes);
    }
    int32_t lanes[VL], most = 0, whole[BLOCK], sum = 0;
    memcpy(lanes, &sizes, sizeof sizes);
    UNROLL for (int i = 0; i < VL; i++) most = lanes[i] > most ? lanes[i] : most;
    float largest;
    memcpy(&largest, &most, sizeof largest);
    float inverse = 127.0f / largest;
    if (!(inverse <= FLT_MAX)) inverse = 0.0f;
    UNROLL for (int i = 0; i < BLOCK; i += VL) {
        vi integers = (vi)(load(x + i) * inverse + bias) - (vi)bias;
        memcpy(whole + i, &integers, sizeof integers);
    }
    for (int i = 0; i < BLOCK; i++) out->q[i] = (int8_t)whole[i], sum += out->q[i];
    out->scale = largest / 127.0f;
    out->sum = out->scale * (float)sum;
}

static void round_four(const float *x, int64_t stride, Inputs4 *out) {
    for (int r = 0; r < 4; r++) {
        Inputs one;
        round_inputs(x + r * stride, &one);
        for (int g = 0; g < BLOCK / 4; g++) memcpy(out->q[g][r], one.q + 4 * g, 4);
        out->scale[r] = one.scale, out->sum[r] = one.sum;
    }
}

INLINE int block_bytes(const int kind) { return kind == INT8_Q8_0 ? 34 : kind == INT8_Q4_0 ? 18 : 20; }

#if defined(__ARM_FEATURE_DOTPROD)
#include "int8_neon.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "int8_x86.h"
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

INLINE int dot(const int8_t *w, const int8_t *x) {
    int sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += w[i] * x[i];
    return sum;
}

INLINE Four dots(const Weights8 *w, const Inputs *x, const int kind) {
    Four out;
    UNROLL for (int c = 0; c < COLS; c++) out[c] = (float)dot(w->numbers[c], x->q);
    return out;
}

INLINE Four load_four(const float *at) {
    Four out;
    memcpy(&out, at, sizeof out);
    return out;
}

/* The weight rows with four token rows. */
INLINE void dots_of_four(const Weights8 *w, const Inputs4 *x, Four *out, const int kind) {
    for (int c = 0; c < COLS; c++) {
        int sums[4] = {0};
        for (int g = 0; g < BLOCK / 4; g++)
            for (int r = 0; r < 4; r++)
                for (int i = 0; i < 4; i++) sums[r] += w->numbers[c][4 * g + i] * x->q[g][r][i];
        out[c] = (Four){(float)sums[0], (float)sums[1], (float)sums[2], (float)sums[3]};
    }
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
    int64_t b = 0;
#if defined(__ARM_FEATURE_DOTPROD)
    if (rows == 1) {
        sums[0] = sum_row(at, p->blocks, p->x + (t - first) * p->blocks, at[0] + COLS * m->row_bytes, kind);
        b = p->blocks;
    }
#endif
    for (; b < p->blocks; b++) {
        Weights8 w = open_blocks(at, kind);
        UNROLL for (int r = 0; r < rows; r++) {
            const Inputs *x = p->x + (t + r - first) * p->blocks + b;
            sums[r] = fused_four(dots(&w, x, kind), w.scale * x->scale, sums[r]);
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
        UNROLL for (int f = 0; f < fours; f++) {
            const Inputs4 *x = p->quads + (t / 4 + f) * p->blocks + b;
            Four dots[COLS];
            dots_of_four(&w, x, dots, kind);
            UNROLL for (int c = 0; c < COLS; c++) {
                sums[c][f] = fused_four(dots[c], load_four(x->scale) * w.scale[c], sums[c][f]);
                if (kind != INT8_Q8_0) sums[c][f] = fused_four(w.least[c] - (Four){0}, load_four(x->sum), sums[c][f]);
            }
        }
        next_blocks(m, at, kind);
    }
    float totals[COLS][8]; /* a copy: sums whose lanes are taken one by one are stored in every turn of the loop above */
    UNROLL for (int c = 0; c < COLS; c++) UNROLL for (int f = 0; f < fours; f++)
        memcpy(totals[c] + 4 * f, &sums[c][f], sizeof sums[c][f]);
    for (int r = 0; r < 4 * fours; r++)
        for (int c = 0; c < COLS && o + c < m->outputs; c++)
            p->y[(t + r) * m->outputs + o + c] = totals[c][r] + (m->bias ? m->bias[o + c] : 0.0f);
}

/* All token rows by tiles of eight, four, two and one: code for every number would take long to compile. */
INLINE void tiles(const Product8 *p, int64_t o, const int kind) {
    int64_t t = 0;
    for (; t + 8 <= p->tokens; t += 8) tile_fours(p, t, o, 2, kind);
    if (t + 4 <= p->tokens) tile_fours(p, t, o, 1, kind), t += 4;
    if (t + 2 <= p->tokens) tile(p, t, o, 2, kind), t += 2;
    if (t < p->tokens) tile(p, t, o, 1, kind);
}

static void multiply(const Product8 *p, int64_t from, int64_t to) {
    for (int64_t o = from; o < to; o += COLS) switch (p->w.kind) {
        case INT8_Q8_0: tiles(p, o, INT8_Q8_0); break;
        case INT8_Q4_0: tiles(p, o, INT8_Q4_0); break;
        default: tiles(p, o, INT8_Q4_1);
        }
}

static _Thread_local void *kept_inputs;
static _Thread_local size_t inputs_size;

#define PIECE 24 /* weight rows that a thread takes at once */

/* Each thread rounds the token rows for itself, so that none waits for them. */
void share_int8_product(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens,
                        const Gates *gates, Team *team) {
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
    const int64_t outputs = gates ? gates->width : w->outputs;
    Loop loop = start_loop(team, (outputs + PIECE - 1) / PIECE);
    for (int64_t i; (i = next_piece(&loop)) >= 0;) {
        int64_t from = i * PIECE, to = outputs - from < PIECE ? outputs : from + PIECE;
        multiply(&p, from, to);
        if (!gates) continue;
        multiply(&p, outputs + from, outputs + to);
        apply_gates(gates, y, w->outputs, 0, tokens, from, to);
    }
    meet(team);
}
