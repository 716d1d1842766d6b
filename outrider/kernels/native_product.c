/* Products with few token rows, for weights in float32, in bfloat16 that stands for float32, and in GGUF's own bits.
 * Weights in other forms than float32 are turned into the float32 numbers they stand for, bit for bit, on their way
 * into the registers, so a product's bits do not depend on how its weight is stored.
 */
#include "native.h"

#define BLOCK 32 /* weights that share a scale */

typedef uint8_t vb __attribute__((vector_size(VL), aligned(1), may_alias));
typedef int8_t vc __attribute__((vector_size(VL), aligned(1), may_alias));

typedef struct {
    Matrix w;
    const float *x;
    float *y;
    int64_t x_stride, tokens;
} Product;

/* Inputs that a kind of weight is read by. */
#define UNIT(kind) ((kind) <= HALVES ? VL : BLOCK)

INLINE vf half(const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
#if defined(__F16C__)
    return splat(_cvtsh_ss(bits));
#else /* the exponent is rebiased by a product, which is exact also for the smallest numbers */
    uint32_t wide = (uint32_t)(bits & 0x7fff) << 13;
    float size;
    memcpy(&size, &wide, 4);
    size *= 0x1p112f;
    return splat(bits & 0x8000 ? -size : size);
#endif
}

/* VL bytes as integers. Compilers take the plain conversion apart byte by byte. */
INLINE vi unsigned_bytes(const uint8_t *at) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
#else
    return __builtin_convertvector(*(const vb *)at, vi);
#endif
}

INLINE vi signed_bytes(const uint8_t *at) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at));
#else
    return __builtin_convertvector(*(const vc *)at, vi);
#endif
}

INLINE vf floats_of(vi q) { return __builtin_convertvector(q, vf); }

/* A block of weights as vectors. A scale has 11 bits and a weight at most 8, so their product is exact and fusing it
 * with the addition of a minimum gives the bits of a product and a sum. */
INLINE void unpack(const uint8_t *block, vf *w, const int kind) {
    vf scale = half(block);
    if (kind == Q8_0) {
        UNROLL for (int v = 0; v < BLOCK / VL; v++)
            w[v] = scale * floats_of(signed_bytes(block + 2 + v * VL));
        return;
    }
    const uint8_t *nibbles = block + (kind == Q4_1 ? 4 : 2);
    vf least = kind == Q4_1 ? half(block + 2) : splat(0);
    UNROLL for (int v = 0; v < BLOCK / VL / 2; v++) { /* the lower halves of 16 bytes, then the upper ones */
        vi q = unsigned_bytes(nibbles + v * VL), low = q & 15, high = q >> 4;
        if (kind == Q4_1) {
            w[v] = fused(scale, floats_of(low), least);
            w[v + BLOCK / VL / 2] = fused(scale, floats_of(high), least);
        } else {
            w[v] = scale * floats_of(low - 8);
            w[v + BLOCK / VL / 2] = scale * floats_of(high - 8);
        }
    }
}

INLINE int64_t unit_bytes(const int kind) {
    return kind == FLOATS ? VL * 4 : kind == HALVES ? VL * 2 : kind == Q8_0 ? 34 : kind == Q4_0 ? 18 : 20;
}

INLINE void load_unit(const uint8_t *at, vf *w, const int kind) {
    if (kind == FLOATS)
        w[0] = load((const float *)at);
    else if (kind == HALVES)
        w[0] = (vf)(__builtin_convertvector(*(const vh *)at, vu) << 16);
    else
        unpack(at, w, kind);
}

/* Only floats and halves have a tail: blocks are whole. */
INLINE vf load_unit_tail(const uint8_t *at, int n, const int kind) {
    if (kind == FLOATS) return load_tail((const float *)at, n);
    uint16_t lanes[VL] = {0};
    vf w;
    memcpy(lanes, at, n * 2);
    load_unit((const uint8_t *)lanes, &w, HALVES);
    return w;
}

/* One weight row's unit into its sums, `cols` apart. */
INLINE void add_unit(const float *x, int64_t x_stride, const vf *unit, vf *sums, const int rows, const int cols,
                     const int kind) {
    UNROLL for (int r = 0; r < rows; r++)
        for (int v = 0; v < UNIT(kind) / VL; v++)
            sums[r * cols] = fused(load(x + r * x_stride + v * VL), unit[v], sums[r * cols]);
}

/* `rows` token rows times `cols` weight rows; both are constants where this is inlined. */
INLINE void product_tile(const Product *p, int64_t t, int64_t o, const int rows, const int cols, const int kind) {
    vf sums[8 * VL];
    const Matrix *m = &p->w;
    const float *x = p->x + t * p->x_stride;
    const uint8_t *w = (const uint8_t *)m->data + o * m->row_bytes;
    int64_t i = 0, ahead = cols * m->row_bytes;
    UNROLL for (int s = 0; s < rows * cols; s++) sums[s] = (vf){0};
    for (; i + UNIT(kind) <= m->inputs; i += UNIT(kind), w += unit_bytes(kind)) {
        vf units[8][BLOCK / 4];
        UNROLL for (int c = 0; c < cols; c++) {
            load_unit(w + c * m->row_bytes, units[c], kind);
            __builtin_prefetch(w + ahead + c * m->row_bytes);
            if (kind > HALVES) /* a block's vectors are used at once: the registers do not hold those of all columns */
                add_unit(x + i, p->x_stride, units[c], sums + c, rows, cols, kind);
        }
        if (kind <= HALVES)
            UNROLL for (int r = 0; r < rows; r++) {
                vf a = load(x + r * p->x_stride + i);
                UNROLL for (int c = 0; c < cols; c++) sums[r * cols + c] = fused(a, units[c][0], sums[r * cols + c]);
            }
    }
    if (i < m->inputs) {
        int n = (int)(m->inputs - i);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < cols; c++)
                sums[r * cols + c] = fused(load_tail(x + r * p->x_stride + i, n),
                                           load_unit_tail(w + c * m->row_bytes, n, kind), sums[r * cols + c]);
    }
    UNROLL for (int s = rows * cols; s < (rows * cols + VL - 1) / VL * VL; s++) sums[s] = (vf){0};
    float totals[8 * VL];
    UNROLL for (int s = 0; s < rows * cols; s += VL) store(totals + s, sum_each(sums + s));
    UNROLL for (int r = 0; r < rows; r++) {
        float *y = p->y + (t + r) * m->outputs + o;
        UNROLL for (int c = 0; c < cols; c++) y[c] = totals[r * cols + c] + (m->bias ? m->bias[o + c] : 0.0f);
    }
}

/* Weight rows per tile for each number of token rows: as many sums as the registers hold. */
#if NV == 4
#define COLS(rows) ((rows) <= 2 ? 8 : (rows) <= 4 ? 6 : (rows) <= 6 ? 4 : 3)
#else
#define COLS(rows) ((rows) <= 1 ? 8 : (rows) <= 2 ? 4 : (rows) <= 4 ? 3 : 1)
#endif

INLINE void product_rest(const Product *p, int64_t from, int64_t to, const int kind) {
    for (int64_t o = from; o < to; o++)
        for (int64_t t = 0; t < p->tokens; t++) product_tile(p, t, o, 1, 1, kind);
}

INLINE void product_few(const Product *p, int64_t from, int64_t to, const int rows, const int kind) {
    int64_t o = from;
    for (; o + COLS(rows) <= to; o += COLS(rows)) product_tile(p, 0, o, rows, COLS(rows), kind);
    product_rest(p, o, to, kind);
}

/* More than eight token rows: a few weight rows stay in the nearest cache while all token rows pass by in fours. */
INLINE void product_many(const Product *p, int64_t from, int64_t to, const int kind) {
    int64_t o = from;
    for (; o + COLS(4) <= to; o += COLS(4)) {
        int64_t t = 0;
        for (; t + 4 <= p->tokens; t += 4) product_tile(p, t, o, 4, COLS(4), kind);
        for (; t < p->tokens; t++) product_tile(p, t, o, 1, COLS(4), kind);
    }
    product_rest(p, o, to, kind);
}

INLINE void dequantize_row(const uint8_t *row, float *out, int64_t inputs, const int kind) {
    for (int64_t i = 0; i < inputs; i += BLOCK, row += unit_bytes(kind)) {
        vf w[BLOCK / VL];
        unpack(row, w, kind);
        for (int v = 0; v < BLOCK / VL; v++) store(out + i + v * VL, w[v]);
    }
}

static _Thread_local void *kept_tile;
static _Thread_local size_t tile_size;

/* The same for blocks, which are unpacked once for all token rows. */
INLINE void product_unpacked(const Product *p, int64_t from, int64_t to, const int kind) {
    const Matrix *m = &p->w;
    float *tile = kept(&kept_tile, &tile_size, COLS(4) * m->inputs * sizeof(float));
    if (!tile) {
        product_many(p, from, to, kind);
        return;
    }
    for (int64_t o = from; o < to; o += COLS(4)) {
        int64_t count = to - o < COLS(4) ? to - o : COLS(4);
        for (int64_t c = 0; c < count; c++)
            dequantize_row((const uint8_t *)m->data + (o + c) * m->row_bytes, tile + c * m->inputs, m->inputs, kind);
        Matrix unpacked = {tile, m->bias ? m->bias + o : NULL, m->inputs * (int64_t)sizeof(float), m->inputs,
                           m->outputs, FLOATS};
        Product part = {unpacked, p->x, p->y + o, p->x_stride, p->tokens};
        product_many(&part, 0, count, FLOATS);
    }
}

INLINE void product_piece(const Product *p, int64_t from, int64_t to, const int kind) {
    switch (p->tokens) {
    case 1: product_few(p, from, to, 1, kind); break;
    case 2: product_few(p, from, to, 2, kind); break;
    case 3: product_few(p, from, to, 3, kind); break;
    case 4: product_few(p, from, to, 4, kind); break;
    case 5: product_few(p, from, to, 5, kind); break;
    case 6: product_few(p, from, to, 6, kind); break;
    case 7: product_few(p, from, to, 7, kind); break;
    case 8: product_few(p, from, to, 8, kind); break;
    default:
        if (kind <= HALVES)
            product_many(p, from, to, kind);
        else
            product_unpacked(p, from, to, kind);
    }
}

static void product_floats(const Product *p, int64_t from, int64_t to) { product_piece(p, from, to, FLOATS); }
static void product_halves(const Product *p, int64_t from, int64_t to) { product_piece(p, from, to, HALVES); }
static void product_q8_0(const Product *p, int64_t from, int64_t to) { product_piece(p, from, to, Q8_0); }
static void product_q4_0(const Product *p, int64_t from, int64_t to) { product_piece(p, from, to, Q4_0); }
static void product_q4_1(const Product *p, int64_t from, int64_t to) { product_piece(p, from, to, Q4_1); }

static void (*const PRODUCTS[])(const Product *, int64_t, int64_t) = {
    [FLOATS] = product_floats, [HALVES] = product_halves, [Q8_0] = product_q8_0,
    [Q4_0] = product_q4_0,     [Q4_1] = product_q4_1,
};

/* Threads share the weight rows in pieces, handed out as threads become free: a core may be busy with others. */
void share_product(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens, int threads) {
    Product p = {*w, x, y, x_stride, tokens};
    int64_t piece = w->outputs / (threads * 4) / 24 * 24; /* whole tiles for every number of token rows */
    piece = piece < 24 ? 24 : piece > 192 ? 192 : piece;
    if (w->inputs * w->outputs < 16384) piece = w->outputs + 1;
#pragma omp for schedule(dynamic)
    for (int64_t from = 0; from < w->outputs; from += piece)
        PRODUCTS[w->kind](&p, from, from + piece < w->outputs ? from + piece : w->outputs);
}

void product(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens, int threads) {
    if (w->inputs * w->outputs < 16384) threads = 1;
    PARALLEL(threads) share_product(w, x, x_stride, y, tokens, threads);
}

/* Weight rows [first, first + count) as float32, for kinds stored in blocks. */
void dequantize(const Matrix *w, int64_t first, int64_t count, float *out, int threads) {
    PARALLEL(threads) {
#pragma omp for
        for (int64_t o = 0; o < count; o++) {
            const uint8_t *row = (const uint8_t *)w->data + (first + o) * w->row_bytes;
            float *to = out + o * w->inputs;
            switch (w->kind) {
            case Q8_0: dequantize_row(row, to, w->inputs, Q8_0); break;
            case Q4_0: dequantize_row(row, to, w->inputs, Q4_0); break;
            case Q4_1: dequantize_row(row, to, w->inputs, Q4_1); break;
            }
        }
    }
}
