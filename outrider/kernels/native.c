/* Small float32 operations of a step on the CPU: norms, activations, rope with cache write, paged attention and
 * products with few token rows. Knows pointers, sizes and strides; shapes and types are checked in native.py and
 * the meaning of each function is its twin in reference.py.
 *
 * The result of a token row never depends on the other rows: a product sums over the inputs in one order for
 * every number of rows, and attention works in tiles of KEYS keys anchored at position 0, merged in order.
 * Compile with -ffp-contract=off: left to itself the compiler fuses a multiplication with an addition in one copy of
 * an inlined function and not in another, and rows then differ in the last bit. And never with -ffast-math: the masks
 * rely on infinities.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define LOWS 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGHS 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
#define VL 8
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15
#define LOWS 0, 8, 1, 9, 2, 10, 3, 11
#define HIGHS 4, 12, 5, 13, 6, 14, 7, 15
#else
#define VL 4
#define EVENS 0, 2, 4, 6
#define ODDS 1, 3, 5, 7
#define LOWS 0, 4, 1, 5
#define HIGHS 2, 6, 3, 7
#endif

/* Vectors per micro-tile, so that the sums of four rows stay in registers (32 of them, or 16 on older x86). */
#if defined(__AVX512F__) || defined(__aarch64__)
#define NV 4
#else
#define NV 2
#endif

#define KEYS 128          /* keys per attention tile; also the unit of work that threads share */
#define MAX_TILE_ROWS 64  /* query rows (tokens x heads of one group) per attention tile */
#define TILE_ROWS 32      /* what a tile aims for */
#define MAX_DIM 512

typedef float vf __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2), aligned(2), may_alias));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define PARALLEL(threads) _Pragma("omp parallel num_threads(threads)")

INLINE vf load(const float *p) { return *(const vfu *)p; }
INLINE void store(float *p, vf v) { *(vfu *)p = v; }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
/* a b + c, rounded once where the machine can. */
INLINE vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
INLINE vf vmax(vf a, vf b) { return pick(a > b, a, b); }

/* A partial vector: lanes n and up are zero. */
INLINE vf load_tail(const float *p, int n) {
    float lanes[VL] = {0};
    for (int i = 0; i < n; i++) lanes[i] = p[i];
    return load(lanes);
}

/* Lane i of the result is the sum of v[i], always by the same tree: neighbours first. Destroys v. */
INLINE vf sum_each(vf *v) {
    UNROLL for (int n = VL / 2; n > 0; n /= 2) {
        UNROLL for (int i = 0; i < n; i++)
            v[i] = SHUFFLE(v[2 * i], v[2 * i + 1], EVENS) + SHUFFLE(v[2 * i], v[2 * i + 1], ODDS);
    }
    return v[0];
}

INLINE float sum_lanes(vf v) {
    float lanes[VL];
    store(lanes, v);
    UNROLL for (int n = VL / 2; n > 0; n /= 2) {
        UNROLL for (int i = 0; i < n; i++) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
    }
    return lanes[0];
}

INLINE float max_lanes(vf v) {
    float lanes[VL], best;
    store(lanes, v);
    best = lanes[0];
    UNROLL for (int i = 1; i < VL; i++) best = lanes[i] > best ? lanes[i] : best;
    return best;
}

/* e^x within 2 ulp; 0 below -87.3 (so also at -inf), NaN stays NaN. */
INLINE vf vexp(vf x) {
    const vf low = splat(-87.33654f), high = splat(88.72283f), magic = splat(12582912.0f);
    vi gone = x < low;
    vf y = pick(x > high, high, x);
    y = pick(gone, low, y);
    vf shifted = fused(y, splat(1.44269504f), magic); /* the integer nearest to y/ln 2, in the low bits */
    vf n = shifted - magic;
    vf r = fused(n, splat(-0.693145752f), y);
    r = fused(n, splat(-1.42860677e-6f), r);
    vf p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p, r * r, r) + 1.0f;
    vi whole = (vi)shifted - (vi)magic;
    vi half = whole >> 1; /* 2^n in two factors: n may be 128 */
    vf scaled = p * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
    return pick(gone, splat(0.0f), scaled);
}

/* ---- norms and activations ---- */

static void norm_row(const float *x, float *residual, const float *weight, float *out, int64_t width, float eps,
                     float offset) {
    vf total = {0};
    int64_t i = 0;
    float rest = 0;
    const float *from = residual ? residual : x;
    if (residual) {
        for (; i + VL <= width; i += VL) store(residual + i, load(residual + i) + load(x + i));
        for (; i < width; i++) residual[i] += x[i];
    }
    for (i = 0; i + VL <= width; i += VL) total = fused(load(from + i), load(from + i), total);
    for (; i < width; i++) rest += from[i] * from[i];
    float scale = 1.0f / sqrtf((sum_lanes(total) + rest) / (float)width + eps);
    for (i = 0; i + VL <= width; i += VL) store(out + i, load(from + i) * scale * (load(weight + i) + offset));
    for (; i < width; i++) out[i] = from[i] * scale * (weight[i] + offset);
}

/* residual may be null: then out = norm(x); otherwise residual += x and out = norm(residual). */
void rms_norm(const float *x, int64_t x_stride, float *residual, int64_t residual_stride, const float *weight,
              float *out, int64_t tokens, int64_t width, float eps, float offset, int threads) {
    if (tokens * width < 65536) threads = 1;
    PARALLEL(threads) {
#pragma omp for
        for (int64_t t = 0; t < tokens; t++)
            norm_row(x + t * x_stride, residual ? residual + t * residual_stride : NULL, weight, out + t * width,
                     width, eps, offset);
    }
}

/* silu(x) = x s(x); gelu by tanh is x s(2u) with u = sqrt(2/pi) (x + 0.044715 x^3): one sigmoid serves both. */
INLINE vf activate(vf gate, int gelu) {
    vf u = gelu ? 1.5957691216f * (gate + 0.044715f * gate * gate * gate) : gate;
    return gate / (1.0f + vexp(-u));
}

INLINE void activate_row(const float *gate, const float *up, float *out, int64_t width, int gelu) {
    int64_t i = 0;
    for (; i + VL <= width; i += VL) store(out + i, activate(load(gate + i), gelu) * load(up + i));
    if (i < width) {
        int n = (int)(width - i);
        vf tail = activate(load_tail(gate + i, n), gelu) * load_tail(up + i, n);
        for (int j = 0; j < n; j++) out[i + j] = tail[j];
    }
}

void gated(const float *gate_up, int64_t stride, float *out, int64_t tokens, int64_t width, int gelu, int threads) {
    if (tokens * width < 16384) threads = 1;
    PARALLEL(threads) {
#pragma omp for
        for (int64_t t = 0; t < tokens; t++) {
            const float *row = gate_up + t * stride;
            if (gelu)
                activate_row(row, row + width, out + t * width, width, 1);
            else
                activate_row(row, row + width, out + t * width, width, 0);
        }
    }
}

/* ---- rope and cache write ---- */

typedef struct {
    const float *cos, *sin;
    int64_t cos_stride, sin_stride, max_len, rotary, second; /* second: where a table holds the other half's angles */
    int64_t heads, kv_heads, dim, page_size, num_pages, k_stride, v_stride;
    const float *q_norm, *k_norm;
    float eps, offset;
} Rope;

static void rotate_head(float *x, const float *cosine, const float *sine, int64_t half, int64_t second) {
    int64_t i = 0;
    for (; i + VL <= half; i += VL) {
        vf a = load(x + i), b = load(x + half + i);
        store(x + i, a * load(cosine + i) - b * load(sine + i));
        store(x + half + i, b * load(cosine + second + i) + a * load(sine + second + i));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[second + i] + a * sine[second + i];
    }
}

/* Returns the number of tokens whose position or slot is out of range; those are left alone. */
int64_t rope_write(float *qkv, int64_t stride, const int64_t *positions, const int64_t *slots, int64_t tokens,
                   float *k_cache, float *v_cache, const Rope *r, int threads) {
    int64_t bad = 0, head_bytes = r->dim * (int64_t)sizeof(float);
    if (tokens * (r->heads + r->kv_heads) * r->dim < 16384) threads = 1;
    PARALLEL(threads) {
#pragma omp for reduction(+ : bad)
        for (int64_t t = 0; t < tokens; t++) {
            int64_t position = positions[t], slot = slots[t];
            if (position < 0 || position >= r->max_len || slot >= r->num_pages * r->page_size) {
                bad++;
                continue;
            }
            float *row = qkv + t * stride, *k = row + r->heads * r->dim, *v = k + r->kv_heads * r->dim;
            const float *cosine = r->cos + position * r->cos_stride, *sine = r->sin + position * r->sin_stride;
            for (int64_t h = 0; h < r->heads + r->kv_heads; h++) {
                float *head = row + h * r->dim;
                const float *weight = h < r->heads ? r->q_norm : r->k_norm;
                if (weight) norm_row(head, NULL, weight, head, r->dim, r->eps, r->offset);
                rotate_head(head, cosine, sine, r->rotary / 2, r->second);
            }
            if (slot < 0) continue;
            int64_t page = slot / r->page_size, offset = (slot % r->page_size) * r->kv_heads * r->dim;
            memcpy(k_cache + page * r->k_stride + offset, k, r->kv_heads * head_bytes);
            memcpy(v_cache + page * r->v_stride + offset, v, r->kv_heads * head_bytes);
        }
    }
    return bad;
}

/* ---- products with few token rows: y[t, o] = sum_i x[t, i] w[o, i] + bias[o] ---- */

typedef struct {
    const float *x;
    const void *w; /* float, or the upper halves of floats whose lower halves are zero (bfloat16) */
    const float *bias;
    float *y;
    int64_t x_stride, w_stride, y_stride, tokens, inputs;
} Product;

INLINE vf load_weight(const void *w, int64_t at, int halves) {
    if (!halves) return load((const float *)w + at);
    return (vf)(__builtin_convertvector(*(const vh *)((const uint16_t *)w + at), vu) << 16);
}

INLINE vf load_weight_tail(const void *w, int64_t at, int n, int halves) {
    if (!halves) return load_tail((const float *)w + at, n);
    uint16_t lanes[VL] = {0};
    for (int i = 0; i < n; i++) lanes[i] = ((const uint16_t *)w)[at + i];
    return load_weight(lanes, 0, 1);
}

/* `rows` token rows times `cols` weight rows; both are constants where this is inlined. */
INLINE void product_tile(const Product *p, int64_t t, int64_t o, const int rows, const int cols, const int halves) {
    vf sums[8 * VL];
    const float *x = p->x + t * p->x_stride;
    int64_t at = o * p->w_stride, i = 0, ahead = cols * p->w_stride;
    UNROLL for (int s = 0; s < rows * cols; s++) sums[s] = (vf){0};
    for (; i + VL <= p->inputs; i += VL) {
        vf w[8];
        UNROLL for (int c = 0; c < cols; c++) {
            w[c] = load_weight(p->w, at + c * p->w_stride + i, halves);
            __builtin_prefetch((const char *)p->w + (at + ahead + c * p->w_stride + i) * (halves ? 2 : 4));
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vf a = load(x + r * p->x_stride + i);
            UNROLL for (int c = 0; c < cols; c++) sums[r * cols + c] = fused(a, w[c], sums[r * cols + c]);
        }
    }
    if (i < p->inputs) {
        int n = (int)(p->inputs - i);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < cols; c++)
                sums[r * cols + c] = fused(load_tail(x + r * p->x_stride + i, n),
                                           load_weight_tail(p->w, at + c * p->w_stride + i, n, halves),
                                           sums[r * cols + c]);
    }
    UNROLL for (int s = rows * cols; s < (rows * cols + VL - 1) / VL * VL; s++) sums[s] = (vf){0};
    float totals[8 * VL];
    UNROLL for (int s = 0; s < rows * cols; s += VL) store(totals + s, sum_each(sums + s));
    UNROLL for (int r = 0; r < rows; r++) {
        float *y = p->y + (t + r) * p->y_stride + o;
        UNROLL for (int c = 0; c < cols; c++) y[c] = totals[r * cols + c] + (p->bias ? p->bias[o + c] : 0.0f);
    }
}

/* Weight rows per tile for each number of token rows: as many sums as the registers hold. */
#if NV == 4
#define COLS(rows) ((rows) <= 2 ? 8 : (rows) <= 4 ? 6 : (rows) <= 6 ? 4 : 3)
#else
#define COLS(rows) ((rows) <= 1 ? 8 : (rows) <= 2 ? 4 : (rows) <= 4 ? 3 : 1)
#endif

INLINE void product_rest(const Product *p, int64_t from, int64_t to, const int halves) {
    for (int64_t o = from; o < to; o++)
        for (int64_t t = 0; t < p->tokens; t++) product_tile(p, t, o, 1, 1, halves);
}

INLINE void product_few(const Product *p, int64_t from, int64_t to, const int rows, const int halves) {
    int64_t o = from;
    for (; o + COLS(rows) <= to; o += COLS(rows)) product_tile(p, 0, o, rows, COLS(rows), halves);
    product_rest(p, o, to, halves);
}

/* More than eight token rows: a few weight rows stay in the nearest cache while all token rows pass by in fours. */
INLINE void product_many(const Product *p, int64_t from, int64_t to, const int halves) {
    int64_t o = from;
    for (; o + COLS(4) <= to; o += COLS(4)) {
        int64_t t = 0;
        for (; t + 4 <= p->tokens; t += 4) product_tile(p, t, o, 4, COLS(4), halves);
        for (; t < p->tokens; t++) product_tile(p, t, o, 1, COLS(4), halves);
    }
    product_rest(p, o, to, halves);
}

INLINE void product_piece(const Product *p, int64_t from, int64_t to, const int halves) {
    switch (p->tokens) {
    case 1: product_few(p, from, to, 1, halves); break;
    case 2: product_few(p, from, to, 2, halves); break;
    case 3: product_few(p, from, to, 3, halves); break;
    case 4: product_few(p, from, to, 4, halves); break;
    case 5: product_few(p, from, to, 5, halves); break;
    case 6: product_few(p, from, to, 6, halves); break;
    case 7: product_few(p, from, to, 7, halves); break;
    case 8: product_few(p, from, to, 8, halves); break;
    default: product_many(p, from, to, halves);
    }
}

static void product_floats(const Product *p, int64_t from, int64_t to) { product_piece(p, from, to, 0); }
static void product_halves(const Product *p, int64_t from, int64_t to) { product_piece(p, from, to, 1); }

/* Threads share the weight rows in pieces, handed out as threads become free: a core may be busy with others. */
void product(const float *x, int64_t x_stride, const void *w, int64_t w_stride, const float *bias, float *y,
             int64_t y_stride, int64_t tokens, int64_t inputs, int64_t outputs, int halves, int threads) {
    Product p = {x, w, bias, y, x_stride, w_stride, y_stride, tokens, inputs};
    int64_t piece = outputs / (threads * 4) / 24 * 24; /* whole tiles for every number of token rows */
    piece = piece < 24 ? 24 : piece > 192 ? 192 : piece;
    if (inputs * outputs < 16384) threads = 1;
    PARALLEL(threads) {
#pragma omp for schedule(dynamic)
        for (int64_t from = 0; from < outputs; from += piece) {
            int64_t to = from + piece < outputs ? from + piece : outputs;
            if (halves)
                product_halves(&p, from, to);
            else
                product_floats(&p, from, to);
        }
    }
}

/* ---- paged attention ---- */

typedef struct {
    const float *q, *k_cache, *v_cache;
    float *out;
    int64_t q_stride, k_stride, v_stride; /* of a token, a page, a page */
    const void *page_table, *query_starts, *lengths, *live;
    const int64_t *key_starts; /* first key a request may see, or null */
    int64_t table_stride, table_width, num_pages, page_size;
    int64_t tokens, requests, heads, kv_heads, dim, window; /* window 0: all keys */
    float scale, softcap;                                   /* softcap 0: none */
    int wide_table, wide_starts, wide_lengths, wide_live;   /* 64-bit integers, or 32 */
} Attention;

/* Some tokens of one request, one kv head, tiles of keys [from, to). Partial results go to `partial` when tiles are
 * shared among threads, and are merged at once otherwise. */
typedef struct {
    int64_t request, token, count, position, head, from, to, first_key;
    float *partial;
} Item;

INLINE int64_t integer(const void *p, int wide, int64_t i) {
    return wide ? ((const int64_t *)p)[i] : ((const int32_t *)p)[i];
}

/* C[r, :] = sum_j A[r, j] B_j[:]: `rows` rows by `nv` vectors, both constants; B_j is rows_of_b[j] + shift. */
INLINE void outer(const float *a, int64_t a_stride, const float *const *b, int64_t shift, int64_t from, int64_t to,
                  float *c, int64_t c_stride, const int rows, const int nv) {
    vf sums[4 * NV];
    UNROLL for (int s = 0; s < rows * nv; s++) sums[s] = (vf){0};
    for (int64_t j = from; j < to; j++) {
        vf bv[NV];
        UNROLL for (int v = 0; v < nv; v++) bv[v] = load(b[j] + shift + v * VL);
        UNROLL for (int r = 0; r < rows; r++) {
            vf av = splat(a[r * a_stride + j]);
            UNROLL for (int v = 0; v < nv; v++) sums[r * nv + v] = fused(av, bv[v], sums[r * nv + v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int v = 0; v < nv; v++) store(c + r * c_stride + v * VL, sums[r * nv + v]);
    }
}

INLINE void outer_rows(const float *a, int64_t a_stride, const float *const *b, int64_t shift, int64_t from,
                       int64_t to, float *c, int64_t c_stride, int64_t rows, const int nv) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        outer(a + r * a_stride, a_stride, b, shift, from, to, c + r * c_stride, c_stride, 4, nv);
    a += r * a_stride;
    c += r * c_stride;
    switch (rows - r) {
    case 3: outer(a, a_stride, b, shift, from, to, c, c_stride, 3, nv); break;
    case 2: outer(a, a_stride, b, shift, from, to, c, c_stride, 2, nv); break;
    case 1: outer(a, a_stride, b, shift, from, to, c, c_stride, 1, nv); break;
    }
}

static void outer_wide(const float *a, int64_t a_stride, const float *const *b, int64_t shift, int64_t from,
                       int64_t to, float *c, int64_t c_stride, int64_t rows) {
    outer_rows(a, a_stride, b, shift, from, to, c, c_stride, rows, NV);
}

static void outer_narrow(const float *a, int64_t a_stride, const float *const *b, int64_t shift, int64_t from,
                         int64_t to, float *c, int64_t c_stride, int64_t rows) {
    outer_rows(a, a_stride, b, shift, from, to, c, c_stride, rows, 1);
}

/* VL rows of VL floats, transposed: to[i * stride + j] = from[j][at + i]. */
static void transpose(const float *const *from, int64_t at, float *to, int64_t stride) {
    vf a[VL], b[VL];
    UNROLL for (int i = 0; i < VL; i++) a[i] = load(from[i] + at);
    UNROLL for (int n = VL; n > 1; n /= 2) {
        UNROLL for (int i = 0; i < VL / 2; i++) {
            b[2 * i] = SHUFFLE(a[i], a[i + VL / 2], LOWS);
            b[2 * i + 1] = SHUFFLE(a[i], a[i + VL / 2], HIGHS);
        }
        UNROLL for (int i = 0; i < VL; i++) a[i] = b[i];
    }
    UNROLL for (int i = 0; i < VL; i++) store(to + i * stride, a[i]);
}

/* Where the keys [from, to) of a tile lie. False if the table does not reach or names a page that is not there. */
static int find_keys(const Attention *a, const Item *item, int64_t base, int64_t from, int64_t to,
                     const float **k_rows, const float **v_rows) {
    int64_t token_stride = a->kv_heads * a->dim;
    for (int64_t j = from; j < to;) {
        int64_t column = (base + j) / a->page_size, offset = (base + j) % a->page_size;
        if (column >= a->table_width) return 0;
        int64_t page = integer(a->page_table, a->wide_table, item->request * a->table_stride + column);
        if (page < 0 || page >= a->num_pages) return 0;
        const float *k = a->k_cache + page * a->k_stride + item->head * a->dim;
        const float *v = a->v_cache + page * a->v_stride + item->head * a->dim;
        for (; offset < a->page_size && j < to; offset++, j++) {
            k_rows[j] = k + offset * token_stride;
            v_rows[j] = v + offset * token_stride;
        }
    }
    return 1;
}

typedef struct {
    float scaled_q[MAX_TILE_ROWS * MAX_DIM];
    float scores[MAX_TILE_ROWS * KEYS];
    float keys[MAX_DIM * NV * VL]; /* some keys, transposed */
    float part[MAX_TILE_ROWS * (MAX_DIM + 2)];
    float merged[MAX_TILE_ROWS * (MAX_DIM + 2)];
    const float *k_rows[KEYS], *v_rows[KEYS], *key_lines[MAX_DIM];
} Scratch;

/* scores[row, from..to) of one tile. `from` and `to` are multiples of VL; rows of keys outside the request's are
 * stand-ins, masked later. */
static void score_keys(const Attention *a, Scratch *s, int64_t rows, int64_t from, int64_t to) {
    for (int64_t j = from; j < to;) {
        int64_t width = to - j >= NV * VL ? NV * VL : VL;
        for (int64_t v = 0; v < width; v += VL)
            for (int64_t d = 0; d < a->dim; d += VL)
                transpose(s->k_rows + j + v, d, s->keys + d * NV * VL + v, NV * VL);
        if (width > VL)
            outer_wide(s->scaled_q, a->dim, s->key_lines, 0, 0, a->dim, s->scores + j, KEYS, rows);
        else
            outer_narrow(s->scaled_q, a->dim, s->key_lines, 0, 0, a->dim, s->scores + j, KEYS, rows);
        j += width;
    }
}

INLINE vf cap(vf x, float softcap) { return softcap * (1.0f - 2.0f / (vexp(x * (2.0f / softcap)) + 1.0f)); }

/* Scores of one row to weights e^(score - max), zero outside keys [first, last]. Returns the max, sets the sum. */
static float weigh(float *scores, int64_t from, int64_t to, int64_t first, int64_t last, float softcap, float *sum) {
    vf best = splat(-INFINITY), total = {0};
    vi lane;
    for (int i = 0; i < VL; i++) lane[i] = i;
    for (int64_t j = from; j < to; j += VL) {
        vf x = load(scores + j);
        if (softcap > 0) x = cap(x, softcap);
        vi at = lane + (int32_t)j;
        x = pick((at >= (int32_t)first) & (at <= (int32_t)last), x, splat(-INFINITY));
        store(scores + j, x);
        best = vmax(best, x);
    }
    float top = max_lanes(best), base = top == -INFINITY ? 0.0f : top;
    for (int64_t j = from; j < to; j += VL) {
        vf x = vexp(load(scores + j) - base);
        store(scores + j, x);
        total += x;
    }
    *sum = sum_lanes(total);
    return top;
}

/* One tile of keys for all rows of an item: part[row] = max, sum, weighted values. */
static int attend_tile(const Attention *a, const Item *item, int64_t tile, Scratch *s, float *part) {
    int64_t group = a->heads / a->kv_heads, rows = item->count * group, base = tile * KEYS, dim = a->dim;
    int64_t begin = item->first_key - base; /* as seen from this tile */
    int64_t low = a->window > 0 ? item->position - a->window + 1 - base : 0;
    int64_t high = item->position + item->count - base; /* one past the last key the last token sees */
    low = low < begin ? begin : low;
    low = low < 0 ? 0 : low;
    high = high > KEYS ? KEYS : high;
    if (!find_keys(a, item, base, low, high, s->k_rows, s->v_rows)) return 0;
    int64_t from = low / VL * VL, to = (high + VL - 1) / VL * VL;
    for (int64_t j = from; j < low; j++) s->k_rows[j] = s->k_rows[low];
    for (int64_t j = high; j < to; j++) s->k_rows[j] = s->k_rows[low];
    score_keys(a, s, rows, from, to);
    for (int64_t r = 0; r < rows; r++) {
        int64_t last = item->position + r / group - base, first = a->window > 0 ? last - a->window + 1 : 0;
        first = first < begin ? begin : first;
        part[r * (dim + 2)] = weigh(s->scores + r * KEYS, from, to, first < 0 ? 0 : first, last < -1 ? -1 : last,
                                    a->softcap, part + r * (dim + 2) + 1);
    }
    int64_t d = 0;
    for (; d + NV * VL <= dim; d += NV * VL)
        outer_wide(s->scores, KEYS, s->v_rows, d, low, high, part + 2 + d, dim + 2, rows);
    for (; d < dim; d += VL) outer_narrow(s->scores, KEYS, s->v_rows, d, low, high, part + 2 + d, dim + 2, rows);
    return 1;
}

/* Both hold max, sum, weighted values. */
static void merge(float *into, const float *part, int64_t dim) {
    float top = into[0] > part[0] ? into[0] : part[0];
    if (top == -INFINITY) return;
    vf factors = {into[0] - top, part[0] - top};
    factors = vexp(factors);
    vf old = splat(factors[0]), new = splat(factors[1]);
    into[0] = top;
    into[1] = into[1] * factors[0] + part[1] * factors[1];
    for (int64_t d = 2; d < dim + 2; d += VL) store(into + d, fused(load(into + d), old, load(part + d) * new));
}

static void clear(float *merged, int64_t rows, int64_t dim) {
    memset(merged, 0, rows * (dim + 2) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) merged[r * (dim + 2)] = -INFINITY;
}

static void finish(const Attention *a, const Item *item, int64_t row, const float *merged) {
    int64_t group = a->heads / a->kv_heads;
    float *out = a->out + ((item->token + row / group) * a->heads + item->head * group + row % group) * a->dim;
    for (int64_t d = 0; d < a->dim; d += VL) store(out + d, load(merged + 2 + d) / merged[1]);
}

static int attend(const Attention *a, const Item *item, Scratch *s) {
    int64_t group = a->heads / a->kv_heads, rows = item->count * group, width = a->dim + 2;
    for (int64_t r = 0; r < rows; r++) {
        const float *q = a->q + (item->token + r / group) * a->q_stride + (item->head * group + r % group) * a->dim;
        for (int64_t d = 0; d < a->dim; d += VL) store(s->scaled_q + r * a->dim + d, load(q + d) * a->scale);
    }
    for (int64_t d = 0; d < a->dim; d++) s->key_lines[d] = s->keys + d * NV * VL;
    if (item->partial) return attend_tile(a, item, item->from, s, item->partial);
    clear(s->merged, rows, a->dim);
    for (int64_t tile = item->from; tile < item->to; tile++) {
        if (!attend_tile(a, item, tile, s, s->part)) return 0;
        for (int64_t r = 0; r < rows; r++) merge(s->merged + r * width, s->part + r * width, a->dim);
    }
    for (int64_t r = 0; r < rows; r++) finish(a, item, r, s->merged + r * width);
    return 1;
}

/* Merges the partial results of consecutive items that share their tokens and head; `item` is the first. */
static void join(const Attention *a, const Item *item, Scratch *s) {
    int64_t rows = item->count * (a->heads / a->kv_heads), width = a->dim + 2;
    clear(s->merged, rows, a->dim);
    for (int64_t i = 0; i < item->to - item->from; i++)
        for (int64_t r = 0; r < rows; r++) merge(s->merged + r * width, item[i].partial + r * width, a->dim);
    for (int64_t r = 0; r < rows; r++) finish(a, item, r, s->merged + r * width);
}

/* Lists the work. With `items` null only counts. Tiles are shared among threads if `share`; each item then covers
 * one tile, keeping in `to` the end of the whole range as seen from the first. Returns the count, or -1. */
static int64_t list_items(const Attention *a, int share, Item *items, float *partials) {
    int64_t group = a->heads / a->kv_heads, per_tile = group >= TILE_ROWS ? 1 : TILE_ROWS / group, n = 0;
    for (int64_t r = 0; r < a->requests; r++) {
        int64_t start = integer(a->query_starts, a->wide_starts, r);
        int64_t end = integer(a->query_starts, a->wide_starts, r + 1);
        int64_t live = integer(a->live, a->wide_live, r), length = integer(a->lengths, a->wide_lengths, r);
        if (start < 0 || start > end || end > a->tokens || live > end - start || live > length) return -1;
        if (a->key_starts && live > 0 && (a->key_starts[r] < 0 || a->key_starts[r] > length - live)) return -1;
        for (int64_t t = 0; t < live; t += per_tile) {
            int64_t count = live - t < per_tile ? live - t : per_tile, position = length - live + t;
            int64_t first_key = a->key_starts ? a->key_starts[r] : 0, low = first_key;
            if (a->window > 0 && position - a->window + 1 > low) low = position - a->window + 1;
            low /= KEYS;
            int64_t high = (position + count - 1) / KEYS + 1;
            for (int64_t h = 0; h < a->kv_heads; h++)
                for (int64_t from = low; from < high; from = share ? from + 1 : high, n++)
                    if (items) {
                        items[n] = (Item){r, start + t, count, position, h, from, high, first_key, share ? partials : NULL};
                        if (share) partials += count * group * (a->dim + 2);
                    }
        }
    }
    return n;
}

/* Tokens that are not live: zeros. */
static void zero_dead(const Attention *a) {
    int64_t width = a->heads * a->dim, cursor = 0;
    for (int64_t r = 0; r < a->requests; r++) {
        int64_t start = integer(a->query_starts, a->wide_starts, r), live = integer(a->live, a->wide_live, r);
        if (live <= 0) continue;
        memset(a->out + cursor * width, 0, (start - cursor) * width * sizeof(float));
        cursor = start + live;
    }
    memset(a->out + cursor * width, 0, (a->tokens - cursor) * width * sizeof(float));
}

/* Memory a thread keeps from call to call. */
static void *kept(void **memory, size_t *size, size_t need) {
    if (*size < need) {
        free(*memory);
        *memory = malloc(need);
        *size = *memory ? need : 0;
    }
    return *memory;
}

static _Thread_local void *kept_scratch, *kept_items, *kept_partials;
static _Thread_local size_t scratch_size, items_size, partials_size;

static void attend_all(const Attention *a, const Item *items, int64_t n, int share, int threads, int64_t *bad) {
    int64_t failed = 0;
    PARALLEL(threads) {
        Scratch *s = kept(&kept_scratch, &scratch_size, sizeof(Scratch));
#pragma omp for schedule(dynamic) reduction(+ : failed)
        for (int64_t i = 0; i < n; i++) failed += !s || !attend(a, items + i, s);
        if (share) {
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < n; i++)
                if (s && (i == 0 || items[i].head != items[i - 1].head || items[i].token != items[i - 1].token))
                    join(a, items + i, s);
        }
    }
    *bad = failed;
}

/* Returns 0, or what is wrong: 1 query starts, lengths or live counts, 2 the page table, 3 memory. */
int paged_attention(const Attention *a, int threads) {
    int64_t group = a->heads / a->kv_heads, n = list_items(a, 0, NULL, NULL), bad = 0;
    if (n < 0) return 1;
    zero_dead(a);
    int share = 0;
    if (n < 4 * threads) { /* too few items to keep the threads busy: share the tiles of keys as well */
        int64_t tiles = list_items(a, 1, NULL, NULL);
        share = threads > 1 && tiles > n;
        n = share ? tiles : n;
    }
    int64_t rows = group > TILE_ROWS ? group : TILE_ROWS;
    float *partials = NULL;
    if (share) partials = kept(&kept_partials, &partials_size, n * rows * (a->dim + 2) * sizeof(float));
    Item *items = kept(&kept_items, &items_size, (n + 1) * sizeof(Item));
    if (!items || (share && !partials)) return 3;
    list_items(a, share, items, partials);
    attend_all(a, items, n, share, n > 1 ? threads : 1, &bad);
    return bad ? 2 : 0;
}
