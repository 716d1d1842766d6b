/* Products with few token rows, for weights in float32, in bfloat16 that stands for float32, and in fp8 with scales.
 * Weights of fewer bits are turned into float32 on their way into the registers, so a product's bits do not depend on
 * how its weight is stored. Products with weights whose codes are integers are in packed.c.
 */
#include "native.h"
#if defined(__aarch64__)
#include "panel_neon.h"
#endif

#define MAX_SUMS (VL > 8 ? 32 : 16) /* of a tile: the registers hold them, and trees add them up, VL at a time */

/* Token rows are packed: vectors of the same inputs lie side by side, so a tile reads one aligned run of memory. */
typedef struct {
    Matrix w;
    const float *x;
    float *y;
    int64_t tokens;
} Product;

INLINE int64_t padded(int64_t inputs) { return (inputs + VL - 1) / VL * VL; }

INLINE int64_t unit_bytes(const int kind) { return kind == FLOATS ? VL * 4 : kind == HALVES ? VL * 2 : VL; }

/* Numbers of 8 bits (e4m3) as floats, each 2^-120 times the number: the bits of its exponent and fraction, moved to
 * their places in a float, whose exponents begin elsewhere. The scales in `Matrix` make up for that. */
INLINE vf load_quarters(const uint8_t *at) {
#if defined(__AVX512F__) /* compilers convert vectors of bytes one by one */
    vi codes = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
#elif defined(__AVX2__)
    vi codes = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
#else
    vi codes = __builtin_convertvector(*(const vb *)at, vi);
#endif
    return (vf)(codes << 24 >> 4 & (int32_t)0x87ffffff);
}

#if defined(__aarch64__)
/* The same for 16 numbers, whose two upper bytes in floats are made side by side. */
INLINE void load_16_quarters(const uint8_t *at, vf *units) {
    const uint8x16_t codes = vld1q_u8(at), zero = vdupq_n_u8(0), third = vshlq_n_u8(codes, 4);
    const uint8x16_t top = vandq_u8(vreinterpretq_u8_s8(vshrq_n_s8(vreinterpretq_s8_u8(codes), 4)), vdupq_n_u8(0x87));
    const uint16x8_t uppers[2] = {vreinterpretq_u16_u8(vzip1q_u8(third, top)),
                                  vreinterpretq_u16_u8(vzip2q_u8(third, top))};
    UNROLL for (int h = 0; h < 2; h++) {
        units[2 * h] = (vf)vzip1q_u16(vreinterpretq_u16_u8(zero), uppers[h]);
        units[2 * h + 1] = (vf)vzip2q_u16(vreinterpretq_u16_u8(zero), uppers[h]);
    }
}
#endif

INLINE vf load_unit(const uint8_t *at, const int kind) {
    if (kind == FLOATS) return load((const float *)at);
    if (kind == QUARTERS) return load_quarters(at);
    return (vf)(__builtin_convertvector(*(const vh *)at, vu) << 16);
}

INLINE vf load_unit_tail(const uint8_t *at, int n, const int kind) {
    if (kind == FLOATS) return load_tail((const float *)at, n);
    uint16_t lanes[VL] = {0};
    memcpy(lanes, at, n * unit_bytes(kind) / VL);
    return load_unit((const uint8_t *)lanes, kind);
}

INLINE vf times(vf unit, vf scale, const int kind) { return kind == QUARTERS ? unit * scale : unit; }

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

/* Adds the products of some inputs to the sums of a tile, of `rows` packed token rows with `cols` weight rows, each of
 * which has a scale if they are QUARTERS. What is const int is a constant where this is inlined. */
INLINE void add_products(vf *sums, const float *x, Weights at, const vf *scales, int64_t inputs, const int rows,
                         const int cols, const int fetched, const int kind) {
    TileRows weights = find_rows(at, cols);
    int64_t i = 0;
#if defined(__aarch64__)
    for (; kind == QUARTERS && i + 4 * VL <= inputs; i += 4 * VL, x += 4 * rows * VL) {
        UNROLL for (int line = 0; line < fetched * 4 * VL; line += 64) __builtin_prefetch(at.next + line);
        vf units[8][4];
        UNROLL for (int c = 0; c < cols; c++) {
            load_16_quarters(tile_row(&weights, c), units[c]);
            UNROLL for (int u = 0; u < 4; u++) units[c][u] *= scales[c];
        }
        UNROLL for (int u = 0; u < 4; u++)
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int c = 0; c < cols; c++)
                    sums[r * cols + c] = fused(load(x + (u * rows + r) * VL), units[c][u], sums[r * cols + c]);
        at.next += fetched * 4 * VL;
        UNROLL for (int f = 0; f * 4 < cols; f++) weights.fours[f] += 4 * VL;
    }
#endif
    for (; i + VL <= inputs; i += VL, x += rows * VL) {
        UNROLL for (int line = 0; line < fetched * unit_bytes(kind); line += 64) __builtin_prefetch(at.next + line);
        vf units[8];
        UNROLL for (int c = 0; c < cols; c++) units[c] = times(load_unit(tile_row(&weights, c), kind), scales[c], kind);
        UNROLL for (int r = 0; r < rows; r++) {
            vf a = load(x + r * VL);
            if (cols > 1) a = in_register(a);
            UNROLL for (int c = 0; c < cols; c++) sums[r * cols + c] = fused(a, units[c], sums[r * cols + c]);
        }
        at.next += fetched * unit_bytes(kind);
        UNROLL for (int f = 0; f * 4 < cols; f++) weights.fours[f] += unit_bytes(kind);
    }
    if (i < inputs)
        UNROLL for (int c = 0; c < cols; c++) {
            vf unit = times(load_unit_tail(tile_row(&weights, c), (int)(inputs - i), kind), scales[c], kind);
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

/* The scale of the inputs of a group in a weight row, if the weights are QUARTERS. */
INLINE vf scale_of(const Product *p, int64_t o, int64_t group, const int kind) {
    return kind == QUARTERS ? splat(p->w.scales[group * p->w.outputs + o]) : (vf){0};
}

INLINE void product_tile(const Product *p, int64_t o, const int rows, const int cols, const int fetched,
                         const int kind) {
    const int64_t inputs = p->w.inputs, size = kind == QUARTERS ? p->w.group : inputs;
    Weights at = {weight_row(p, o), weight_row(p, o + cols + AHEAD(cols)), p->w.row_bytes};
    vf sums[MAX_SUMS], scales[8];
    UNROLL for (int s = 0; s < MAX_SUMS; s++) sums[s] = (vf){0};
    for (int64_t first = 0, group = 0; first < inputs; first += size, group++) {
        UNROLL for (int c = 0; c < cols; c++) scales[c] = scale_of(p, o + c, group, kind);
        add_products(sums, p->x + first * rows, at, scales, inputs - first < size ? inputs - first : size, rows, cols,
                     fetched, kind);
        at.w += size / VL * unit_bytes(kind), at.next += size / VL * fetched * unit_bytes(kind);
    }
    store_products(p, 0, rows, o, sums, rows, cols);
}

/* Weight rows per tile for each number of token rows: up to 16 sums, which the registers hold and one tree adds up. */
#if NV == 4 /* with vectors of four lanes, the fetches of eight weight rows take longer than their products */
#define COLS(rows) ((rows) <= 2 && VL > 4 ? 8 : (rows) <= 4 ? 4 : (rows) <= 5 ? 3 : 2)
#else
#define COLS(rows) ((rows) <= 1 ? 8 : (rows) <= 2 ? 4 : (rows) <= 4 ? 3 : 1)
#endif

INLINE void product_few(const Product *p, int64_t from, int64_t to, const int rows, const int kind) {
    int64_t o = from;
    const int cols = COLS(rows);
    for (; o + cols <= to; o += cols) product_tile(p, o, rows, cols, cols, kind);
    for (; o < to; o++) product_tile(p, o, rows, 1, 0, kind);
}

/* Inputs [first, end) of a weight row as floats; `stride` from one vector to the next. */
INLINE void floats_row(const Product *p, int64_t o, int64_t first, int64_t end, float *out, int64_t stride,
                       const int kind) {
    const uint8_t *row = weight_row(p, o) + first / VL * unit_bytes(kind);
    for (int64_t i = first, group = kind == QUARTERS ? first / p->w.group : 0; i < end; group++) {
        const int64_t stop = kind == QUARTERS && (group + 1) * p->w.group < end ? (group + 1) * p->w.group : end;
        const vf scale = scale_of(p, o, group, kind);
        for (; i + VL <= stop; i += VL, row += unit_bytes(kind), out += stride)
            store(out, times(load_unit(row, kind), scale, kind));
        if (i == stop) continue;
        store(out, times(load_unit_tail(row, (int)(stop - i), kind), scale, kind));
        i = stop;
    }
}

static _Thread_local void *kept_panel, *kept_x;
static _Thread_local size_t panel_size, x_size;

#define GROUP 4          /* token rows that pass by together where there are many */
#define PANEL (28 << 10) /* bytes of weights in floats that they pass by: about half of a nearest cache */
#define SLICE 128        /* token rows packed at once */
#define SLICE8 64        /* token rows with packed weights: see MANY in packed.c */
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
    int64_t rows[PANEL_ROWS];
    for (int c = 0; c < PANEL_ROWS; c++) rows[c] = c < count ? o + c : o + count - 1;
    for (; kind == FLOATS && i + VL <= inputs; i += VL, panel += PANEL_ROWS * VL)
        UNROLL for (int c = 0; c < PANEL_ROWS; c++)
            store(panel + c * VL, load((const float *)weight_row(p, rows[c]) + i));
    for (int c = 0; i < inputs && c < PANEL_ROWS; c++)
        floats_row(p, rows[c], i, inputs, panel + c * VL, PANEL_ROWS * VL, kind);
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
#define PANEL_COLS (VL > 8 ? 6 : COLS(GROUP)) /* weight rows of a tile */
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
    const vf no_scales[8] = {{0}};
    add_products(sums, x, at, no_scales, part.count, GROUP, cols, fetched, FLOATS);
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
    const int64_t inputs = parts == 1 ? m->inputs : (m->inputs / parts + 32) / 32 * 32; /* of a part */
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
                floats_row(p, o + c, part.first, part.first + part.count, (float *)(panel + c * row_bytes), VL, kind);
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
static void product_quarters(const Product *p, int64_t from, int64_t to) { product_piece(p, from, to, QUARTERS); }
static void (*const PRODUCTS[])(const Product *, int64_t, int64_t) = {
    [FLOATS] = product_floats, [HALVES] = product_halves, [QUARTERS] = product_quarters,
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
    const int64_t slice = w->kind == PACKED ? SLICE8 : SLICE;
    for (int64_t t = 0; t < tokens; t += slice) {
        const float *from = x + t * x_stride;
        float *to = y + t * w->outputs;
        const int64_t count = tokens - t < slice ? tokens - t : slice;
        Gates part = gates ? (Gates){gates->out + t * gates->width, gates->width, gates->gelu} : (Gates){0};
        /* or they would not be whole tiles of weight rows */
        const int at_once = gates && gates->width % 16 == 0 && (w->kind != PACKED || packed_is_aligned(w));
        if (w->kind == PACKED)
            share_packed_product(w, from, x_stride, to, count, at_once ? &part : NULL, team);
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
