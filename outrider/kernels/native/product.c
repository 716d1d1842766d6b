/* Products with few token rows, for weights in float32, in bfloat16 that stands for float32, and in GGUF's own bits.
 * Weights in other forms than float32 are turned into the float32 numbers they stand for, bit for bit, on their way
 * into the registers, so a product's bits do not depend on how its weight is stored.
 */
#include "native.h"
#if defined(__aarch64__)
#include "blocks_neon.h"
#include "panel_neon.h"
#include "row_neon.h"
#endif

#define BLOCK 32    /* weights that share a scale */
#define MAX_SUMS (VL > 8 ? 32 : 16) /* of a tile: the registers hold them, and trees add them up, VL at a time */

typedef uint8_t vb __attribute__((vector_size(VL), aligned(1), may_alias));
typedef int8_t vc __attribute__((vector_size(VL), aligned(1), may_alias));

/* Token rows are packed: vectors of the same inputs lie side by side, so a tile reads one aligned run of memory. */
typedef struct {
    Matrix w;
    const float *x;
    float *y;
    int64_t tokens;
} Product;

/* Inputs that a kind of weight is read by. */
#define UNIT(kind) ((kind) <= HALVES ? VL : BLOCK)

/* Weight rows whose units are in registers together, so that a load of x serves all of them. With one token row blocks
 * are unpacked one by one: x stays in registers then. */
#define AT_ONCE(rows, cols, kind) ((kind) <= HALVES ? (cols) : VL < 16 || (rows) == 1 ? 1 : (cols) <= 3 ? (cols) : 2)

INLINE int64_t padded(int64_t inputs) { return (inputs + VL - 1) / VL * VL; }

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

/* A block's scale and, in the kinds that have it, its minimum. */
INLINE void scales(const uint8_t *block, vf *scale, vf *least) {
#if defined(__AVX512F__) /* Both by one conversion, then from memory into all lanes: that takes no vector unit. */
    float both[2] __attribute__((aligned(8)));
    __m128 pair;
    __asm__("vcvtph2ps %1, %0" : "=v"(pair) : "m"(*(const uint8_t(*)[8])block));
    _mm_storel_pi((__m64 *)both, pair);
    __asm__("" : "+m"(both)); /* or they are copied from the register after all */
    *scale = splat(both[0]);
    *least = splat(both[1]);
#else
    *scale = half(block);
    *least = half(block + 2);
#endif
}

/* A block of weights as vectors. A scale has 11 bits and a weight at most 8, so their product is exact and fusing it
 * with the addition of a minimum gives the bits of a product and a sum. */
INLINE void unpack(const uint8_t *block, vf *w, const int kind) {
#if defined(__aarch64__)
    unpack_neon(block, w, kind);
    return;
#endif
    vf scale, least;
    scales(block, &scale, &least);
    if (kind == Q8_0) {
        UNROLL for (int v = 0; v < BLOCK / VL; v++)
            w[v] = scale * floats_of(signed_bytes(block + 2 + v * VL));
        return;
    }
    const uint8_t *nibbles = block + (kind == Q4_1 ? 4 : 2);
#if defined(__AVX512F__) /* the 16 weights there can be, picked by the lower four bits of an index */
    const vf count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    __m512 weights = (__m512)(kind == Q4_1 ? fused(scale, count, least) : scale * (count - 8.0f));
    vi q = unsigned_bytes(nibbles);
    w[0] = (vf)_mm512_permutexvar_ps((__m512i)q, weights);
    w[1] = (vf)_mm512_permutexvar_ps((__m512i)(q >> 4), weights);
#else
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
#endif
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

/* Keeps the compiler from loading the same vector again for each use. */
INLINE vf in_register(vf a) {
#if defined(__x86_64__)
    __asm__("" : "+v"(a));
#endif
    return a;
}

/* Where a tile's weights lie, and what to fetch meanwhile: for each unit that the tile reads of its rows, the next of
 * `fetched` times as many bytes. */
typedef struct {
    const uint8_t *w, *next;
    int64_t row_bytes;
} Weights;

/* The weight rows of a tile by a pointer for every four and two distances. Left to themselves compilers keep a pointer
 * for each row, too many for the registers, and move them to and from mask registers, which takes vector units. */
typedef struct {
    const uint8_t *fours[4];
    int64_t once, thrice;
} TileRows;

INLINE TileRows find_rows(Weights at, const int cols) {
    TileRows rows = {.once = at.row_bytes, .thrice = 3 * at.row_bytes};
    UNROLL for (int f = 0; f * 4 < cols; f++) rows.fours[f] = at.w + 4 * f * at.row_bytes;
#if defined(__x86_64__)
    __asm__("" : "+r"(rows.thrice));
    UNROLL for (int f = 0; f * 4 < cols; f++) __asm__("" : "+r"(rows.fours[f]));
#endif
    return rows;
}

INLINE const uint8_t *tile_row(const TileRows *rows, const int c) {
    return rows->fours[c / 4] + (c % 4 == 3 ? rows->thrice : c % 4 * rows->once);
}

/* Adds the products of some inputs to the sums of a tile, of `rows` packed token rows with `cols` weight rows. What is
 * const int is a constant where this is inlined. */
INLINE void add_products(vf *sums, const float *x, Weights at, int64_t inputs, const int rows, const int cols,
                         const int fetched, const int kind) {
    const int at_once = AT_ONCE(rows, cols, kind), keeps_x = rows == 1 && kind > HALVES && VL == 16;
    TileRows weights = find_rows(at, cols);
    int64_t i = 0;
    for (; i + UNIT(kind) <= inputs; i += UNIT(kind), x += rows * UNIT(kind)) {
        vf kept_x[BLOCK / VL];
        if (keeps_x) UNROLL for (int v = 0; v < BLOCK / VL; v++) kept_x[v] = in_register(load(x + v * VL));
        UNROLL for (int line = 0; line < fetched * unit_bytes(kind); line += 64) __builtin_prefetch(at.next + line);
        UNROLL for (int g = 0; g < cols; g += at_once) {
            vf units[8][BLOCK / VL];
            UNROLL for (int c = 0; c < at_once; c++) load_unit(tile_row(&weights, g + c), units[c], kind);
            UNROLL for (int v = 0; v < UNIT(kind) / VL; v++)
                UNROLL for (int r = 0; r < rows; r++) {
                    vf a = keeps_x ? kept_x[v] : load(x + (v * rows + r) * VL);
                    if (at_once > 1) a = in_register(a);
                    UNROLL for (int c = 0; c < at_once; c++)
                        sums[r * cols + g + c] = fused(a, units[c][v], sums[r * cols + g + c]);
                }
        }
        at.next += fetched * unit_bytes(kind);
        UNROLL for (int f = 0; f * 4 < cols; f++) weights.fours[f] += unit_bytes(kind);
    }
    if (kind <= HALVES && i < inputs)
        UNROLL for (int c = 0; c < cols; c++) {
            vf unit = load_unit_tail(tile_row(&weights, c), (int)(inputs - i), kind);
            UNROLL for (int r = 0; r < rows; r++)
                sums[r * cols + c] = fused(load(x + r * VL), unit, sums[r * cols + c]);
        }
}

/* The results of a tile: weight rows from o on, token rows from t on, of which `live` are there. */
INLINE void store_products(const Product *p, int64_t t, int live, int64_t o, const vf *sums, const int rows,
                           const int cols) {
    const Matrix *m = &p->w;
    float totals[MAX_SUMS];
    vf held[MAX_SUMS]; /* a copy: sums that are summed up in place do not stay in registers in the loop above */
    UNROLL for (int s = 0; s < MAX_SUMS; s++) held[s] = sums[s];
    UNROLL for (int s = 0; s < rows * cols; s += VL) store(totals + s, sum_each(held + s));
    __asm__("" : "+m"(totals)); /* or they are taken out of a register one by one */
    for (int r = 0; r < live; r++) {
        float *y = p->y + (t + r) * m->outputs + o;
        UNROLL for (int c = 0; c < cols; c++) y[c] = totals[r * cols + c] + (m->bias ? m->bias[o + c] : 0.0f);
    }
}

/* Weight rows between a tile and what is fetched meanwhile: that is fetched row by row, and a tile reads all its rows at
 * once, so the last one's first units would come too late. */
#define AHEAD(cols) ((cols) / 2)

INLINE const uint8_t *weight_row(const Product *p, int64_t o) {
    return (const uint8_t *)p->w.data + o * p->w.row_bytes;
}

INLINE void product_tile(const Product *p, int64_t o, const int rows, const int cols, const int fetched,
                         const int kind) {
    Weights at = {weight_row(p, o), weight_row(p, o + cols + AHEAD(cols)), p->w.row_bytes};
    vf sums[MAX_SUMS];
    UNROLL for (int s = 0; s < MAX_SUMS; s++) sums[s] = (vf){0};
    add_products(sums, p->x, at, p->w.inputs, rows, cols, fetched, kind);
    store_products(p, 0, rows, o, sums, rows, cols);
}

/* Weight rows per tile for each number of token rows: up to 16 sums, which the registers hold and one tree adds up. */
#if NV == 4 /* with vectors of four lanes, the fetches of eight weight rows take longer than their products */
#define COLS(rows, kind)                                                                                               \
    ((rows) <= 1 && VL > 8 && (kind) > HALVES ? 16                                                                     \
     : (rows) <= 2 && VL > 4                  ? 8                                                                      \
     : (rows) <= 4                            ? 4                                                                      \
     : (rows) <= 5                            ? 3                                                                      \
                                              : 2)
#else
#define COLS(rows, kind) ((rows) <= 1 ? 8 : (rows) <= 2 ? 4 : (rows) <= 4 ? 3 : 1)
#endif

#if defined(__aarch64__)
#define ROW_GROUPS 48 /* fours of weight rows whose sums are kept before they are added up */

/* One token row, weight rows four by four. In the last four the last row stands in for missing ones. */
INLINE void product_row_blocks(const Product *p, int64_t from, int64_t to, const int kind) {
    const Matrix *m = &p->w;
    for (int64_t o = from; o < to;) {
        vf sums[4 * ROW_GROUPS];
        const uint8_t *w[4];
        int64_t groups = (to - o) / 4 > ROW_GROUPS ? ROW_GROUPS : to - o < 4 ? 1 : (to - o) / 4;
        int64_t end = to - o < 4 * groups ? to : o + 4 * groups;
        for (int c = 0; c < 4; c++) w[c] = weight_row(p, o + c < to ? o + c : to - 1);
        multiply_rows(w, groups, m->inputs / BLOCK, unit_bytes(kind), 4 * m->row_bytes, p->x, sums, kind);
        for (vf *four = sums; o < end; four += 4) {
            float totals[4];
            store(totals, sum_each(four));
            for (int c = 0; c < 4 && o < end; c++, o++) p->y[o] = totals[c] + (m->bias ? m->bias[o] : 0.0f);
        }
    }
}

/* Weight rows two by two; a last one without a partner is its own. */
INLINE void product_few_blocks(const Product *p, int64_t from, int64_t to, const int rows, const int kind) {
    const Matrix *m = &p->w;
    for (int64_t o = from; o < to; o += 2) {
        vf sums[MAX_SUMS];
        float totals[MAX_SUMS];
        int64_t other = o + 1 < to ? o + 1 : o, ahead = o + 3 < to ? 2 * m->row_bytes : 0;
        multiply_blocks(weight_row(p, o), weight_row(p, other), m->inputs / BLOCK, unit_bytes(kind), ahead, p->x, sums,
                        rows, kind);
        UNROLL for (int s = 0; s < MAX_SUMS; s += VL)
            if (s % 8 < rows) store(totals + s, sum_each(sums + s));
        for (int r = 0; r < rows; r++)
            for (int64_t c = o; c <= other; c++)
                p->y[r * m->outputs + c] = totals[(c - o) * 8 + r] + (m->bias ? m->bias[c] : 0.0f);
    }
}
#endif

INLINE void product_few(const Product *p, int64_t from, int64_t to, const int rows, const int kind) {
#if defined(__aarch64__)
    if (kind > HALVES && rows == 1 && (kind != Q4_1 || p->w.least_is_exact)) {
        product_row_blocks(p, from, to, kind);
        return;
    }
    if (kind > HALVES) {
        product_few_blocks(p, from, to, rows, kind);
        return;
    }
#endif
    int64_t o = from;
    const int cols = COLS(rows, kind);
    for (; o + cols <= to; o += cols) product_tile(p, o, rows, cols, cols, kind);
    for (; o < to; o++) product_tile(p, o, rows, 1, 0, kind);
}

/* A weight row as floats; `stride` from one vector to the next. */
INLINE void floats_row(const uint8_t *row, float *out, int64_t stride, int64_t inputs, const int kind) {
    int64_t i = 0;
    for (; i + UNIT(kind) <= inputs; i += UNIT(kind), row += unit_bytes(kind)) {
        vf w[BLOCK / VL];
        load_unit(row, w, kind);
        for (int v = 0; v < UNIT(kind) / VL; v++, out += stride) store(out, w[v]);
    }
    if (i < inputs) store(out, load_unit_tail(row, (int)(inputs - i), kind));
}

static _Thread_local void *kept_panel, *kept_x;
static _Thread_local size_t panel_size, x_size;

#define GROUP 4          /* token rows that pass by together where there are many */
#define PANEL (28 << 10) /* bytes of weights in floats that they pass by: about half of a nearest cache */
#define SLICE 128        /* token rows packed at once */
#define SLICE8 64        /* token rows rounded to 8 bits and multiplied at once: that many stay in a core's cache */
#define PIECE 48         /* weight rows that a thread takes at once: whole tiles for every number of token rows */

#if defined(__aarch64__)
/* Four token rows with four weight rows of a panel, of which `count` are there, from o on. */
INLINE void product_four(const Product *p, int64_t t, int64_t o, int64_t count, const float *w) {
    const Matrix *m = &p->w;
    const float *x = p->x + t * padded(m->inputs);
    int64_t live = p->tokens - t < GROUP ? p->tokens - t : GROUP;
    float totals[GROUP * PANEL_ROWS], *y = p->y + t * m->outputs + o;
    if (live == GROUP && count == PANEL_ROWS && !m->bias) {
        multiply_panel(x, w, padded(m->inputs) / VL, y, m->outputs);
        return;
    }
    multiply_panel(x, w, padded(m->inputs) / VL, totals, PANEL_ROWS);
    for (int64_t r = 0; r < live; r++, y += m->outputs)
        for (int64_t c = 0; c < count; c++) y[c] = totals[r * PANEL_ROWS + c] + (m->bias ? m->bias[o + c] : 0.0f);
}

/* Four weight rows side by side, as floats. The last of `count` stands in for missing ones. */
INLINE void fill_panel(const Product *p, int64_t o, int64_t count, float *panel, const int kind) {
    const int64_t inputs = p->w.inputs;
    int64_t i = 0;
    const uint8_t *rows[PANEL_ROWS];
    for (int c = 0; c < PANEL_ROWS; c++) rows[c] = weight_row(p, c < count ? o + c : o + count - 1);
    for (; kind == FLOATS && i + VL <= inputs; i += VL, panel += PANEL_ROWS * VL)
        UNROLL for (int c = 0; c < PANEL_ROWS; c++) store(panel + c * VL, load((const float *)rows[c] + i));
    for (int c = 0; i < inputs && c < PANEL_ROWS; c++)
        floats_row(rows[c] + i * 4, panel + c * VL, PANEL_ROWS * VL, inputs - i, kind);
}

/* More than eight token rows: all of them pass by a panel of weight rows in the nearest cache, as floats. */
INLINE void product_many(const Product *p, int64_t from, int64_t to, const int kind) {
    const Matrix *m = &p->w;
    const int64_t four = PANEL_ROWS * padded(m->inputs), fours = PANEL / (four * 4) < 1 ? 1 : PANEL / (four * 4);
    float *panel = kept(&kept_panel, &panel_size, fours * four * sizeof(float) + 64);
    if (!panel) abort(); /* tens of kilobytes: nothing would run on without them */
    for (int64_t o = from; o < to; o += fours * PANEL_ROWS) {
        int64_t end = to - o < fours * PANEL_ROWS ? to : o + fours * PANEL_ROWS, used = (end - o + 3) / PANEL_ROWS;
        for (int64_t f = 0, c = o; f < used; f++, c += PANEL_ROWS)
            fill_panel(p, c, end - c < PANEL_ROWS ? end - c : PANEL_ROWS, panel + f * four, kind);
        for (int64_t t = 0; t < p->tokens; t += GROUP)
            for (int64_t f = 0, c = o; f < used; f++, c += PANEL_ROWS)
                product_four(p, t, c, end - c < PANEL_ROWS ? end - c : PANEL_ROWS, panel + f * four);
    }
}
#else
#define PANEL_COLS (VL > 8 ? 6 : COLS(GROUP, FLOATS)) /* weight rows of a tile */
#define PART 768 /* inputs that pass by at once: of more, token rows and panel do not stay in the nearest cache together */

/* Some inputs, from `first` on. */
typedef struct {
    int64_t first, count;
} Part;

static _Thread_local void *kept_sums;
static _Thread_local size_t sums_size;

/* Four token rows with `cols` weight rows of a panel, of which `part` is there. Sums of the inputs before it lie in
 * `so_far`, and go there if more follow. */
INLINE void add_part(const Product *p, int64_t t, int64_t o, Weights at, Part part, vf *so_far, const int cols,
                     const int fetched) {
    const float *x = p->x + t * padded(p->w.inputs) + part.first * GROUP;
    vf sums[MAX_SUMS];
    UNROLL for (int s = 0; s < MAX_SUMS; s++) sums[s] = s < GROUP * cols && part.first > 0 ? so_far[s] : (vf){0};
    add_products(sums, x, at, part.count, GROUP, cols, fetched, FLOATS);
    if (part.first + part.count < p->w.inputs)
        UNROLL for (int s = 0; s < GROUP * cols; s++) so_far[s] = sums[s];
    else
        store_products(p, t, p->tokens - t < GROUP ? (int)(p->tokens - t) : GROUP, o, sums, GROUP, cols);
}

/* Four token rows with the weight rows of a panel. */
INLINE void product_panel(const Product *p, int64_t t, int64_t o, int64_t count, Weights at, Part part, vf *so_far,
                          const int fetched) {
    int64_t c = 0;
    for (; c + PANEL_COLS <= count; c += PANEL_COLS) {
        add_part(p, t, o + c, at, part, so_far + c * GROUP, PANEL_COLS, fetched);
        at.w += PANEL_COLS * at.row_bytes, at.next += at.row_bytes;
    }
    for (; c < count; c++, at.w += at.row_bytes) add_part(p, t, o + c, at, part, so_far + c * GROUP, 1, 0);
}

/* More than eight token rows: all of them pass by a panel of weight rows in the nearest cache. Floats are used where
 * they are, and the next panel is fetched row by row meanwhile; other weights are turned into floats once. */
INLINE void product_many(const Product *p, int64_t from, int64_t to, const int kind) {
    const Matrix *m = &p->w;
    const int64_t parts = kind == FLOATS ? 1 : (m->inputs + PART - 1) / PART;
    const int64_t inputs = parts == 1 ? m->inputs : (m->inputs / parts + BLOCK) / BLOCK * BLOCK; /* of a part */
    const int64_t row_bytes = kind == FLOATS ? m->row_bytes : padded(inputs) * (int64_t)sizeof(float);
    const int64_t tiles = PANEL / row_bytes / PANEL_COLS, size = (tiles < 1 ? 1 : tiles) * PANEL_COLS;
    uint8_t *panel = kind == FLOATS ? NULL : kept(&kept_panel, &panel_size, size * row_bytes);
    vf *so_far = parts == 1 ? NULL : kept(&kept_sums, &sums_size, (p->tokens + GROUP) * size * sizeof(vf));
    if ((kind != FLOATS && !panel) || (parts > 1 && !so_far)) abort(); /* nothing would run on without so little */
    for (int64_t o = from; o < to; o += size) {
        int64_t count = to - o < size ? to - o : size;
        for (Part part = {0, inputs}; part.first < m->inputs; part.first += inputs) {
            if (m->inputs - part.first < inputs) part.count = m->inputs - part.first;
            Weights at = {kind == FLOATS ? weight_row(p, o) : panel, weight_row(p, o + size), row_bytes};
            for (int64_t c = 0; kind != FLOATS && c < count; c++)
                floats_row(weight_row(p, o + c) + part.first / UNIT(kind) * unit_bytes(kind),
                           (float *)(panel + c * row_bytes), VL, part.count, kind);
            for (int64_t t = 0; t < p->tokens; t += GROUP, at.next += size / PANEL_COLS * row_bytes)
                product_panel(p, t, o, count, at, part, so_far + t * size, kind == FLOATS);
        }
    }
}
#endif

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
    default: product_many(p, from, to, kind);
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

/* Token rows in groups of `group`, each packed, the last one filled up with zeros. */
static void pack(const float *x, int64_t stride, int64_t tokens, int64_t inputs, int64_t group, float *out) {
    for (int64_t t = 0; t < tokens; t += group)
        for (int64_t i = 0; i < inputs; i += VL)
            for (int64_t r = t; r < t + group; r++, out += VL) {
                const float *at = x + r * stride + i;
                store(out, r >= tokens ? (vf){0} : i + VL <= inputs ? load(at) : load_tail(at, (int)(inputs - i)));
            }
}

/* Each thread has its own packed token rows, so that none waits for them. */
static void share_slice(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens,
                        const Gates *gates, Team *team) {
    int64_t group = tokens <= 8 ? tokens : GROUP;
    float *packed = kept(&kept_x, &x_size, (tokens + group) * padded(w->inputs) * sizeof(float) + 64);
    if (!packed) abort(); /* likewise */
    pack(x, x_stride, tokens, w->inputs, group, packed);
    Product p = {*w, packed, y, tokens};
    const int64_t outputs = gates ? gates->width : w->outputs;
    const int64_t piece = w->inputs * w->outputs < 16384 ? outputs : PIECE;
    Loop loop = start_loop(team, (outputs + piece - 1) / piece);
    for (int64_t i; (i = next_piece(&loop)) >= 0;) {
        int64_t from = i * piece, to = outputs - from < piece ? outputs : from + piece;
        PRODUCTS[w->kind](&p, from, to);
        if (!gates) continue;
        PRODUCTS[w->kind](&p, outputs + from, outputs + to);
        apply_gates(gates, y, w->outputs, 0, tokens, from, to);
    }
    meet(team);
}

void share_product(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens, const Gates *gates,
                   Team *team) {
    const int64_t slice = w->kind < INT8_Q8_0 ? SLICE : SLICE8;
    for (int64_t t = 0; t < tokens; t += slice) {
        const float *from = x + t * x_stride;
        float *to = y + t * w->outputs;
        const int64_t count = tokens - t < slice ? tokens - t : slice;
        Gates part = gates ? (Gates){gates->out + t * gates->width, gates->width, gates->gelu} : (Gates){0};
        const int at_once = gates && gates->width % 16 == 0; /* or they would not be whole tiles of weight rows */
        if (w->kind >= LANES_Q8_0)
            share_lanes_product(w, from, x_stride, to, count, at_once ? &part : NULL, team);
        else if (w->kind >= INT8_Q8_0)
            share_int8_product(w, from, x_stride, to, count, at_once ? &part : NULL, team);
        else
            share_slice(w, from, x_stride, to, count, at_once ? &part : NULL, team);
        if (!gates || at_once) continue;
#pragma omp for nowait
        for (int64_t row = 0; row < count; row++) apply_gates(&part, to, w->outputs, row, row + 1, 0, part.width);
        meet(team);
    }
}

void product(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens, int threads) {
    if (w->inputs * w->outputs < 16384) threads = 1;
    Team team = {.threads = threads};
    PARALLEL(threads) share_product(w, x, x_stride, y, tokens, NULL, &team);
}

/* See row_neon.h; 0 on other machines, which do not ask. */
int64_t find_exact_least(const Matrix *w) {
#if defined(__aarch64__)
    return w->kind == Q4_1 && least_is_exact(w);
#else
    return 0 * w->kind;
#endif
}

/* Weight rows [first, first + count) as float32, for kinds stored in blocks. */
void dequantize(const Matrix *w, int64_t first, int64_t count, float *out, int threads) {
    PARALLEL(threads) {
#pragma omp for
        for (int64_t o = 0; o < count; o++) {
            const uint8_t *row = (const uint8_t *)w->data + (first + o) * w->row_bytes;
            float *to = out + o * w->inputs;
            switch (w->kind) {
            case Q8_0: floats_row(row, to, VL, w->inputs, Q8_0); break;
            case Q4_0: floats_row(row, to, VL, w->inputs, Q4_0); break;
            case Q4_1: floats_row(row, to, VL, w->inputs, Q4_1); break;
            }
        }
    }
}
