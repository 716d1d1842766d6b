/* What the native files share: vectors, the structs that Python packs (structures.py), and the operations by name.
 *
 * The result of a token row never depends on the other rows: a product sums over the inputs in one order for
 * every number of rows, and attention works in tiles of keys anchored at position 0, merged in order.
 * Compile with -ffp-contract=off: left to itself the compiler fuses a multiplication with an addition in one copy of
 * an inlined function and not in another, and rows then differ in the last bit. And never with -ffast-math: the masks
 * rely on infinities.
 */
#pragma once
#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__FMA__)
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

typedef float vf __attribute__((vector_size(VL * 4)));
typedef float vfu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint8_t vb __attribute__((vector_size(VL), aligned(1), may_alias));
typedef uint16_t vh __attribute__((vector_size(VL * 2), aligned(2), may_alias));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")
#define MOST_THREADS 128
#define PARALLEL(threads) _Pragma("omp parallel num_threads((threads) < MOST_THREADS ? (threads) : MOST_THREADS)")

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

/* Outputs of which the first `width` are gates of as many others: the gated ones go to out [tokens, width]. */
typedef struct {
    float *out;
    int64_t width;
    int gelu;
} Gates;

/* Columns [from, to) of token rows [first, last). */
static inline void apply_gates(const Gates *g, const float *y, int64_t stride, int64_t first, int64_t last,
                               int64_t from, int64_t to) {
    for (int64_t t = first; t < last; t++) {
        const float *gate = y + t * stride + from;
        float *out = g->out + t * g->width + from;
        if (g->gelu)
            activate_row(gate, gate + g->width, out, to - from, 1);
        else
            activate_row(gate, gate + g->width, out, to - from, 0);
    }
}

/* Memory a thread keeps from call to call, aligned: a vector across two lines takes twice the time to load. */
static inline void *kept(void **memory, size_t *size, size_t need) {
    if (*size < need) {
        free(*memory);
        need = (need + 63) / 64 * 64;
        *memory = aligned_alloc(64, need);
        *size = *memory ? need : 0;
    }
    return *memory;
}

/* ---- threads ---- */

/* Of one thread of a region. */
typedef struct {
    int64_t asked __attribute__((aligned(64))); /* how often somebody asked for a piece of this thread's work */
    int64_t before;                             /* the same before the present loop; for every thread alike */
} Share;

/* The threads of a parallel region, what each has to do, and where they wait for each other. */
typedef struct {
    int threads;                               /* asked for: there may be fewer */
    uint8_t *inputs;                           /* rounded token rows that all threads read; see packed.c */
    Share shares[MOST_THREADS];
    int arrived __attribute__((aligned(64)));  /* threads that wait */
    int turn __attribute__((aligned(64)));     /* how often all have met */
    int sleepers __attribute__((aligned(64))); /* threads that wait asleep */
} Team;

/* A loop over pieces of work that the threads share. Each thread has as many pieces, side by side, and takes those of
 * others when its own are done: a core may be busy with something else. OpenMP has one counter for all threads, which
 * costs as much as a small piece of work where the threads ask it in turns. */
typedef struct {
    Share *shares;
    int64_t pieces, each, before;
    int threads, self, tried; /* tried: how many threads have no piece left */
} Loop;

/* All threads call, and meet before the next loop. */
INLINE Loop start_loop(Team *team, int64_t pieces) {
#if defined(_OPENMP)
    const int threads = omp_get_num_threads(), self = omp_get_thread_num();
#else
    const int threads = 1, self = 0;
#endif
    Share *own = team->shares + self;
    Loop loop = {team->shares, pieces, (pieces + threads - 1) / threads, own->before, threads, self, 0};
    own->before += loop.each + threads; /* in the end every thread has asked every thread once in vain */
    return loop;
}

/* The next piece for this thread, or -1. */
INLINE int64_t next_piece(Loop *l) {
    while (l->tried < l->threads) {
        int64_t owner = (l->self + l->tried) % l->threads;
        int64_t i = __atomic_fetch_add(&l->shares[owner].asked, 1, __ATOMIC_RELAXED) - l->before;
        if (i >= l->each)
            l->tried++;
        else if (owner * l->each + i < l->pieces)
            return owner * l->each + i;
    }
    return -1;
}

#if defined(_OPENMP) && defined(__x86_64__) && defined(__linux__)
#define PATIENCE 500 /* looks at the others, together about 10 microseconds, before a waiting thread sleeps */

/* Returns when all threads of the region have called. OpenMP's own barrier puts a thread to sleep after 100 looks where
 * a process has more threads than processors, and in a virtual machine to wake it takes longer than most operations
 * of a step. On ARM OpenMP's was faster. */
static inline void meet(Team *team) {
    const int all = omp_get_num_threads(), turn = __atomic_load_n(&team->turn, __ATOMIC_ACQUIRE);
    if (all == 1) return;
    if (__atomic_add_fetch(&team->arrived, 1, __ATOMIC_ACQ_REL) == all) {
        __atomic_store_n(&team->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&team->turn, turn + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&team->sleepers, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &team->turn, FUTEX_WAKE_PRIVATE, all, NULL, NULL, 0);
        return;
    }
    for (int looks = 0; looks < PATIENCE; looks++) {
        if (__atomic_load_n(&team->turn, __ATOMIC_ACQUIRE) != turn) return;
        __builtin_ia32_pause();
    }
    __atomic_add_fetch(&team->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team->turn, __ATOMIC_SEQ_CST) == turn)
        syscall(SYS_futex, &team->turn, FUTEX_WAIT_PRIVATE, turn, NULL, NULL, 0);
    __atomic_sub_fetch(&team->sleepers, 1, __ATOMIC_SEQ_CST);
}
#else
static inline void meet(Team *team) {
    (void)team;
#pragma omp barrier
}
#endif

/* ---- structs ---- */

/* How a weight's rows are stored: float32, bfloat16, quantised and packed (see packed.c), or fp8 (e4m3) with scales. */
enum { FLOATS, HALVES, PACKED, QUARTERS };

/* Forms of packed weights: see packed.c. A number is that of the bits of a code; LEAST: a value is added to each scaled
 * code; HALVES: a scale for every 16 inputs; NESTED: scales have scales; TABLE: 4 bits number the entries of a table. */
enum {
    PACKED_8, PACKED_TABLE, PACKED_4, PACKED_4_LEAST, PACKED_5, PACKED_5_LEAST, NESTED_TABLE, NESTED_4_LEAST,
    NESTED_5_LEAST, NESTED_6_HALVES, NESTED_3_HALVES, NESTED_2_LEAST_HALVES
};

/* Weight rows [first, first + outputs) of a matrix of the kind PACKED, all in one form. */
typedef struct {
    const uint8_t *data;
    const int8_t *table; /* 16 entries, or null */
    int64_t first, outputs, form;
} PackedPart;

/* What the data of such a matrix is. `digits`: of token rows, 1 to 3. */
typedef struct {
    const PackedPart *parts;
    int64_t count, digits;
} PackedParts;

/* Weight rows before they are packed, of `inputs` codes each: scales in float32, and those that these scale, or null. */
typedef struct {
    const uint8_t *codes;
    const float *scale, *least;
    const int8_t *inner_scale, *inner_least;
    int64_t rows, inputs;
} UnpackedRows;

typedef struct {
    const void *data;
    const float *bias; /* or null */
    int64_t row_bytes, inputs, outputs, kind;
    const float *scales; /* of QUARTERS, times 2^120: [groups of inputs, outputs] */
    int64_t group;       /* inputs that share a scale: whole vectors, or all */
} Matrix;

/* The requests of a step: [requests] counts, and a page table of `table_width` columns. */
typedef struct {
    const void *page_table, *query_starts, *lengths, *live;
    const int64_t *key_starts; /* first key a request may see, or null */
    int64_t table_stride, table_width, count;
    int wide_table, wide_starts, wide_lengths, wide_live; /* 64-bit integers, or 32 */
} Requests;

/* A layer's keys and values [pages, page_size, kv_heads, dim]; strides are of pages. */
typedef struct {
    float *k, *v;
    int64_t k_stride, v_stride, num_pages, page_size, kv_heads, dim;
} Cache;

typedef struct {
    Cache cache;
    const float *cos, *sin;
    const int64_t *positions, *slots; /* of each token */
    int64_t cos_stride, sin_stride, max_len, rotary, second; /* second: where a table holds the other half's angles */
    int64_t heads;
    const float *q_norm, *k_norm; /* or null */
    float eps;
} Rope;

typedef struct {
    Requests requests;
    Cache cache;
    const float *q;
    float *out;
    int64_t q_stride, tokens, heads, window; /* q_stride: of a token; window 0: all keys */
    float scale, softcap;                    /* softcap 0: none */
    const float *sinks;                      /* of each head: the score of one more key, whose value is 0; or null */
    int chunked;                             /* the window begins at a multiple of its size, and does not slide */
} Attention;

/* The weights of a decoder layer. */
typedef struct {
    Matrix qkv, out, gate_up, down;
    const float *input_norm, *mlp_norm;
    float eps;
    int gelu;
} Layer;

/* A decoder layer with its cache: all that stays from step to step. */
typedef struct {
    Layer weights;
    Cache cache;
    const float *q_norm, *k_norm; /* or null */
    int64_t heads, window;        /* window 0: all keys */
    float norm_eps, scale, softcap;
    int chunked; /* as in Attention */
} BoundLayer;

/* The batch of a step, as the layers share it; cos and sin [max_len, rotary / 2]. */
typedef struct {
    Requests requests;
    const int64_t *positions, *slots; /* of each token */
    const float *cos, *sin;
    int64_t cos_stride, sin_stride, max_len, rotary, tokens;
} LayerStep;

/* The adapters of all slots (DeltaTables in kernels/delta_tables.py), and the token rows of a step in the order of their
 * slots (RowSlots). */
typedef struct {
    const float *numbers;
    const int64_t *places; /* [slots, num_targets, 3]: where both factors begin, and their rank */
    const float *scales;   /* [slots, num_targets] */
    const int64_t *bounds; /* [num_targets, 2]: output features of the layer that a target is */
    const int64_t *order;  /* [rows]: token rows */
    const int64_t *segments; /* [rows, 3]: first place in that order, the place behind the last, slot or -1 */
    int64_t rows, num_targets, max_rank;
} Adapters;

/* The targets of a product, which lie one behind the other. */
typedef struct {
    int64_t first, count;
} Targets;

/* The targets of a decoder layer's products; of those that adapters do not change, none. */
typedef struct {
    Targets qkv, out, gate_up, down;
} LayerTargets;

/* What adapters add to a product. */
typedef struct {
    const Adapters *adapters;
    Targets targets;
    int64_t num_segments;
    float *inner;          /* [places, targets.count, max_rank]: products with the first factors */
    int64_t first_feature; /* output feature of the layer that the product's first one is */
} Change;

/* The rows of all requests, as steps read and write them. */
typedef struct {
    int64_t *tokens, *known, *computed, *drafts, *num_drafts; /* tokens [rows, length] */
    uint8_t *alive;
    const int64_t *end_len, *num_stop_ids, *stop_ids; /* stop_ids [rows, stop_width] */
    int64_t rows, length, token_stride, draft_stride, stop_stride, stop_width;
} RowState;

/* A step's scheduled integers. */
typedef struct {
    const int64_t *rows, *num_known, *num_drafts, *samples, *query_starts, *request_of, *offset, *logit_request,
        *logit_draft;
    int64_t requests, tokens, logit_rows, max_drafts, max_len, groups, null_row;
} StepInputs;

/* The page table of one group: of all rows, of the requests [requests, width], and the tokens' slots. */
typedef struct {
    const int32_t *from;
    int32_t *to;
    int64_t *slots;
    int64_t stride, width, page_tokens;
} PageTable;

typedef struct {
    int64_t *computed, *num_known, *num_drafts, *live, *lengths, *first_logit, *drafts; /* drafts [requests, most] */
    uint8_t *samples;
    int32_t *lengths32, *live32, *starts32;
} PreparedRequests;

typedef struct {
    int64_t *positions, *token_ids, *logit_row, *logit_position;
} PreparedTokens;

/* A batch whose logit rows are sampled. */
typedef struct {
    const int64_t *sampled, *rows, *num_known, *num_drafts, *first_logit, *drafts;
    const uint8_t *bad, *samples;
    int64_t requests, logit_rows, max_drafts, draft_stride;
} SampledStep;

typedef struct {
    int64_t *run, *run_len, *finish, *num_computed, *num_accepted, *counts;
    uint8_t *goes_on;
} Committed;

/* What one drafter returned: tokens [requests, num_wanted], counts and levels [requests] (levels perhaps NULL), with any
 * values. */
typedef struct {
    const int64_t *tokens, *counts, *levels;
    int64_t request_stride, index_stride;
} Proposal;

/* A batch whose requests get drafts, and the rows that keep them. */
typedef struct {
    const int64_t *rows, *is_on; /* is_on [num_proposals] */
    const uint8_t *goes_on;
    int64_t *drafts, *num_drafts, *levels, *counts; /* drafts [num_rows, at least num_wanted], counts [requests, NUM_COUNTS] */
    int64_t requests, num_proposals, num_wanted, num_rows, draft_stride, counts_stride, vocab_size, fills;
} StoredDrafts;

/* A committed step whose requests get a proposal, the rows, and the slots and pages that the drafter has filled. */
typedef struct {
    const int64_t *rows, *query_starts, *request_of, *computed_before, *num_computed;
    const uint8_t *goes_on;
    const int64_t *row_tokens, *known, *seed, *sample_index; /* of all rows: row_tokens [num_rows, length] */
    const float *temperature;
    int64_t *valid_from, *filled; /* of all rows */
    uint8_t *page_valid;          /* [num_pages] */
    int64_t requests, tokens, num_rows, length, token_stride, num_pages, page_stride, groups, tail_group,
        first_position, max_len, num_wanted;
} DraftPlan;

/* The page table of one group of the drafter [requests, width], and where the slots of the passes go. */
typedef struct {
    const int32_t *pages;
    int64_t *slots, *further_slots; /* [tokens], [num_wanted - 1, requests] */
    int64_t stride, width, page_tokens;
} DraftTable;

/* The passes of a proposal: the first with the step's token rows, then num_wanted - 1 with one for each request. */
typedef struct {
    int64_t *positions, *tokens, *tail_page; /* [tokens] */
    int64_t *lengths, *live, *key_starts, *seed, *sample_index, *counts, *last; /* [requests] */
    int64_t *draft_positions;                                       /* [num_wanted, requests] */
    int64_t *further_positions, *further_lengths, *further_live;    /* [num_wanted - 1, requests] */
    int32_t *lengths32, *live32, *key_starts32, *further_lengths32, *further_live32;
    float *temperature;
} PlannedPasses;

/* An EAGLE-3 head with one layer, with its cache: all that stays from step to step. */
typedef struct {
    Matrix fc, qkv, out, gate_up, down, output;
    Matrix coarse; /* the output in fewer bits, to find the logits that are computed with `output`; or no data */
    Cache cache;
    const float *const *aux_norms; /* of each auxiliary state, or null */
    const float *embedding_norm, *hidden_norm, *mlp_norm, *norm, *q_norm, *k_norm; /* the last two may be null */
    const void *embedding;     /* rows of floats, or a PackedPart */
    const int64_t *target_ids; /* of each output, or null where outputs are the target's tokens */
    const float *cos, *sin;    /* [max_len, rotary / 2] */
    int64_t num_aux, embedding_kind, embedding_bytes, num_embeddings, cos_stride, sin_stride, max_len, rotary, heads,
        window;
    float eps, norm_eps, scale;
    int gelu, norm_before_residual, feeds_back_normed;
} DraftHead;

/* What a head reads and writes for a proposal beside the target's auxiliary states and the plan. */
typedef struct {
    const int32_t *pages; /* page table [requests, width] of the head's layer */
    float *tails;         /* [pages, hidden], pages `tail_stride` floats apart */
    int64_t *drafts;      /* [num_wanted, requests] */
    int64_t *levels;      /* [requests] how sure the head is of each draft, as in core/draft_confidence.py */
    int64_t *counts;      /* [requests] drafts there is room for */
    int64_t table_stride, table_width, page_tokens, tail_stride, any_sampled;
} ChainStep;

/* The work of one attention call, listed. */
typedef struct Item Item;
typedef struct {
    const Attention *attention;
    Item *items;
    int64_t count, together, taken; /* a thread takes so many together; so many are taken */
    int share;                      /* threads share the tiles of keys as well */
} AttentionWork;

/* residual may be null: then out = norm(x), where out may be x; otherwise residual += x and out = norm(residual). */
void norm_row(const float *x, float *residual, const float *weight, float *out, int64_t width, float eps);
/* The numbers that a packed weight row stands for. */
void unpack_row(const PackedPart *part, int64_t inputs, int64_t row, float *out);

/* Returns 0, or what is wrong: 1 a row, a request or a page out of range, 2 a position outside of the rows or behind a
 * page table. */
int plan_draft_passes(const DraftPlan *plan, const DraftTable *tables, const PlannedPasses *out);

/* ---- operations that the threads of a parallel region share: all of them call, and all are done on return ---- */

/* residual may be null: then out = norm(x); otherwise residual += x and out = norm(residual). */
void share_norm(const float *x, int64_t x_stride, float *residual, int64_t residual_stride, const float *weight,
                float *out, int64_t tokens, int64_t width, float eps, Team *team);
/* y[t, o] = sum_i x[t, i] w[o, i] + bias[o]. With `gates`, which may be null, a thread that has computed some gates and
 * what they are for applies them at once, while both are in its cache. */
void share_product(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens, const Gates *gates,
                   Team *team);
/* The same for the kind PACKED, whose parts begin at multiples of VL if there are gates. */
void share_packed_product(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens,
                          const Gates *gates, Team *team);
int packed_is_aligned(const Matrix *w);
/* By one thread: some lanes of VL outputs for one token row, with the bits that the product of all of them has. The
 * matrix has one part. */
void packed_lanes_product(const Matrix *w, const float *x, float *y, const int64_t *lanes, int64_t count);
/* The products of x [tokens, inputs] with the first factors, for `change->inner`. */
void share_reduce(const Change *change, const float *x, int64_t x_stride, int64_t inputs, Team *team);
/* Adds what the second factors make of those to y [tokens, features]. */
void share_add(const Change *change, float *y, int64_t y_stride, int64_t features, Team *team);
/* The segments of a step's token rows, of those without an adapter too. */
int64_t count_segments(const Adapters *adapters);
/* Norms and rope of q and k heads, and the cache write. Counts in `bad` the tokens whose position or slot is out of
 * range; those are left alone. */
void share_rope_write(float *qkv, int64_t stride, int64_t tokens, const Rope *r, int64_t *bad, Team *team);
void share_attention(AttentionWork *work, int64_t *failed, Team *team);

/* Before the region: returns 0, or what is wrong: 1 query starts, lengths or live counts, 3 memory. */
int list_attention(const Attention *a, int threads, AttentionWork *work);
