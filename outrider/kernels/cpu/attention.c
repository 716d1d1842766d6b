/* Paged attention in float32: keys and values are read where they lie, in tiles of KEYS keys anchored at position 0.
 * Knows pointers, sizes and strides; shapes and types are checked in Python, the meaning is its twin in reference.py.
 */
#include "native.h"

#define KEYS 128          /* keys per attention tile; also the unit of work that threads share */
#define MAX_TILE_ROWS 64  /* query rows (tokens x heads of one group) per attention tile */
#define TILE_ROWS 32      /* what a tile aims for */
#define MAX_DIM 512

/* Some tokens of one request, one kv head, tiles of keys [from, to). Partial results go to `partial` when tiles are
 * shared among threads, and are merged at once otherwise. */
struct Item {
    int64_t request, token, count, position, head, from, to, first_key;
    float *partial;
};

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

/* `width` columns of C: NV vectors, or fewer. */
static void outer_columns(const float *a, int64_t a_stride, const float *const *b, int64_t shift, int64_t from,
                          int64_t to, float *c, int64_t c_stride, int64_t rows, int64_t width) {
    switch (width / VL) {
    case 1: outer_rows(a, a_stride, b, shift, from, to, c, c_stride, rows, 1); break;
    case 2: outer_rows(a, a_stride, b, shift, from, to, c, c_stride, rows, 2); break;
#if NV == 4
    case 3: outer_rows(a, a_stride, b, shift, from, to, c, c_stride, rows, 3); break;
    case 4: outer_rows(a, a_stride, b, shift, from, to, c, c_stride, rows, 4); break;
#endif
    }
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

/* The keys [low, high) of a tile that the tokens of an item see, and where they lie. A tile that was not found has a
 * page table that does not reach, or that names a page that is not there. */
typedef struct {
    const Item *item; /* null: there is no tile */
    int64_t index, low, high;
    int is_found;
    const float *k_rows[KEYS], *v_rows[KEYS];
} Tile;

static int find_keys(const Attention *a, Tile *t) {
    const Requests *requests = &a->requests;
    const Cache *cache = &a->cache;
    int64_t token_stride = cache->kv_heads * cache->dim, base = t->index * KEYS;
    for (int64_t j = t->low; j < t->high;) {
        int64_t column = (base + j) / cache->page_size, offset = (base + j) % cache->page_size;
        if (column >= requests->table_width) return 0;
        int64_t at = t->item->request * requests->table_stride + column;
        int64_t page = integer(requests->page_table, requests->wide_table, at);
        if (page < 0 || page >= cache->num_pages) return 0;
        const float *k = cache->k + page * cache->k_stride + t->item->head * cache->dim;
        const float *v = cache->v + page * cache->v_stride + t->item->head * cache->dim;
        for (; offset < cache->page_size && j < t->high; offset++, j++) {
            t->k_rows[j] = k + offset * token_stride;
            t->v_rows[j] = v + offset * token_stride;
        }
    }
    return 1;
}

/* The first key that a token at this position sees, whatever its request's first key is. */
static int64_t first_seen(const Attention *a, int64_t position) {
    if (a->window <= 0) return 0;
    return a->chunked ? position - position % a->window : position - a->window + 1;
}

static void find_tile(const Attention *a, const Item *item, int64_t index, Tile *t) {
    int64_t base = index * KEYS, begin = item->first_key - base; /* as seen from this tile */
    int64_t low = first_seen(a, item->position) - base;
    int64_t high = item->position + item->count - base; /* one past the last key the last token sees */
    low = low < begin ? begin : low;
    t->item = item, t->index = index;
    t->low = low < 0 ? 0 : low, t->high = high > KEYS ? KEYS : high;
    t->is_found = find_keys(a, t);
}

typedef struct {
    float scaled_q[MAX_TILE_ROWS * MAX_DIM];
    float scores[MAX_TILE_ROWS * KEYS];
    float keys[MAX_DIM * NV * VL]; /* some keys, transposed */
    float part[MAX_TILE_ROWS * (MAX_DIM + 2)];
    float merged[MAX_TILE_ROWS * (MAX_DIM + 2)];
    const float *key_lines[MAX_DIM];
    Tile tiles[2];
} Scratch;

#if defined(__x86_64__)
#define CACHE_LEVEL 2 /* x86 is faster if fetched rows wait in the second cache, ARM if in the first */
#else
#define CACHE_LEVEL 3
#endif

/* Asks for the cache lines of a row that is needed soon. Rows of one head lie apart, in pages anywhere, which
 * processors foresee badly (x86) or not at all (ARM). */
INLINE void fetch_row(const float *row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(row + d, 0, CACHE_LEVEL);
}

/* scores[row, from..to) of one tile, and asks for the keys' values. `from` and `to` are multiples of VL; rows of keys
 * outside the tile's are stand-ins, masked later. */
static void score_keys(const Attention *a, Scratch *s, const Tile *t, int64_t rows, int64_t from, int64_t to) {
    int64_t dim = a->cache.dim;
    for (int64_t j = from; j < to;) {
        int64_t width = to - j >= NV * VL ? NV * VL : to - j;
        for (int64_t v = 0; v < width; v += VL) {
            for (int64_t i = j + v; i < j + v + VL; i++) fetch_row(t->v_rows[i], dim);
            for (int64_t d = 0; d < dim; d += VL)
                transpose(t->k_rows + j + v, d, s->keys + d * NV * VL + v, NV * VL);
        }
        outer_columns(s->scaled_q, dim, s->key_lines, 0, 0, dim, s->scores + j, KEYS, rows, width);
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

/* One tile of keys for all rows of an item: part[row] = max, sum, weighted values. Asks for the keys of the tile that
 * comes next. */
static void attend_tile(const Attention *a, Tile *t, const Tile *next, Scratch *s, float *part) {
    const Item *item = t->item;
    int64_t group = a->heads / a->cache.kv_heads, rows = item->count * group, base = t->index * KEYS;
    int64_t dim = a->cache.dim, from = t->low / VL * VL, to = (t->high + VL - 1) / VL * VL;
    int64_t coming = next->item && next->is_found ? next->high - next->low : 0;
    for (int64_t j = from; j < t->low; j++) t->k_rows[j] = t->k_rows[t->low], t->v_rows[j] = t->v_rows[t->low];
    for (int64_t j = t->high; j < to; j++) t->k_rows[j] = t->k_rows[t->low], t->v_rows[j] = t->v_rows[t->low];
    score_keys(a, s, t, rows, from, to);
    for (int64_t r = 0; r < rows; r++) {
        int64_t last = item->position + r / group - base, first = first_seen(a, last + base) - base;
        first = first < item->first_key - base ? item->first_key - base : first;
        part[r * (dim + 2)] = weigh(s->scores + r * KEYS, from, to, first < 0 ? 0 : first, last < -1 ? -1 : last,
                                    a->softcap, part + r * (dim + 2) + 1);
        for (int64_t j = coming * r / rows; j < coming * (r + 1) / rows; j++)
            fetch_row(next->k_rows[next->low + j], dim);
    }
    for (int64_t d = 0; d < dim; d += NV * VL)
        outer_columns(s->scores, KEYS, t->v_rows, d, t->low, t->high, part + 2 + d, dim + 2, rows,
                      dim - d < NV * VL ? dim - d : NV * VL);
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

static void finish(const Attention *a, const Item *item, int64_t row, const float *merged) {
    int64_t group = a->heads / a->cache.kv_heads;
    float *out = a->out + ((item->token + row / group) * a->heads + item->head * group + row % group) * a->cache.dim;
    float total = merged[1];
    if (a->sinks) { /* of one more key: the results have no part of it */
        float sink = a->sinks[item->head * group + row % group], top = merged[0] > sink ? merged[0] : sink;
        vf factors = {merged[0] - top, sink - top};
        factors = vexp(factors);
        total = factors[0] > 0 ? total + factors[1] / factors[0] : INFINITY;
    }
    /* + 0: a zero's sign does not depend on how many results were merged */
    for (int64_t d = 0; d < a->cache.dim; d += VL) store(out + d, (load(merged + 2 + d) + 0.0f) / total);
}

static void scale_queries(const Attention *a, const Item *item, Scratch *s) {
    int64_t group = a->heads / a->cache.kv_heads, dim = a->cache.dim;
    for (int64_t r = 0; r < item->count * group; r++) {
        const float *q = a->q + (item->token + r / group) * a->q_stride + (item->head * group + r % group) * dim;
        for (int64_t d = 0; d < dim; d += VL) store(s->scaled_q + r * dim + d, load(q + d) * a->scale);
    }
}

static int64_t end_of(const Item *item) { return item->partial ? item->from + 1 : item->to; }

/* One tile of an item. The first leaves its results, the others are merged with them. */
static void attend(const Attention *a, Tile *t, const Tile *next, Scratch *s) {
    const Item *item = t->item;
    int64_t rows = item->count * (a->heads / a->cache.kv_heads), width = a->cache.dim + 2;
    float *merged = item->partial ? item->partial : s->merged;
    if (t->index == item->from) {
        scale_queries(a, item, s);
        attend_tile(a, t, next, s, merged);
    } else {
        attend_tile(a, t, next, s, s->part);
        for (int64_t r = 0; r < rows; r++) merge(merged + r * width, s->part + r * width, a->cache.dim);
    }
    if (!item->partial && t->index + 1 == item->to)
        for (int64_t r = 0; r < rows; r++) finish(a, item, r, merged + r * width);
}

/* Merges the partial results of consecutive items that share their tokens and head; `item` is the first. */
static void join(const Attention *a, const Item *item) {
    int64_t rows = item->count * (a->heads / a->cache.kv_heads), width = a->cache.dim + 2;
    for (int64_t r = 0; r < rows; r++) {
        float *merged = item->partial + r * width;
        for (int64_t i = 1; i < item->to - item->from; i++) merge(merged, item[i].partial + r * width, a->cache.dim);
        finish(a, item, r, merged);
    }
}

/* Lists the work. With `items` null only counts. Tiles are shared among threads if `share`; each item then covers
 * one tile, keeping in `to` the end of the whole range as seen from the first. Returns the count, or -1. */
static int64_t list_items(const Attention *a, int share, Item *items, float *partials) {
    const Requests *requests = &a->requests;
    int64_t group = a->heads / a->cache.kv_heads, per_tile = group >= TILE_ROWS ? 1 : TILE_ROWS / group, n = 0;
    for (int64_t r = 0; r < requests->count; r++) {
        int64_t start = integer(requests->query_starts, requests->wide_starts, r);
        int64_t end = integer(requests->query_starts, requests->wide_starts, r + 1);
        int64_t live = integer(requests->live, requests->wide_live, r);
        int64_t length = integer(requests->lengths, requests->wide_lengths, r);
        if (start < 0 || start > end || end > a->tokens || live > end - start || live > length) return -1;
        int64_t first_key = requests->key_starts && live > 0 ? requests->key_starts[r] : 0;
        if (first_key < 0 || first_key > length - live) return -1;
        for (int64_t t = 0; t < live; t += per_tile) {
            int64_t count = live - t < per_tile ? live - t : per_tile, position = length - live + t;
            int64_t low = first_seen(a, position);
            low = low < first_key ? first_key : low;
            low /= KEYS;
            int64_t high = (position + count - 1) / KEYS + 1;
            for (int64_t h = 0; h < a->cache.kv_heads; h++)
                for (int64_t from = low; from < high; from = share ? from + 1 : high, n++)
                    if (items) {
                        items[n] = (Item){r, start + t, count, position, h, from, high, first_key, share ? partials : NULL};
                        if (share) partials += count * group * (a->cache.dim + 2);
                    }
        }
    }
    return n;
}

/* Tokens that are not live: zeros. */
static void zero_dead(const Attention *a) {
    int64_t width = a->heads * a->cache.dim, cursor = 0;
    for (int64_t r = 0; r < a->requests.count; r++) {
        int64_t start = integer(a->requests.query_starts, a->requests.wide_starts, r);
        int64_t live = integer(a->requests.live, a->requests.wide_live, r);
        if (live <= 0) continue;
        memset(a->out + cursor * width, 0, (start - cursor) * width * sizeof(float));
        cursor = start + live;
    }
    memset(a->out + cursor * width, 0, (a->tokens - cursor) * width * sizeof(float));
}

static _Thread_local void *kept_scratch, *kept_items, *kept_partials;
static _Thread_local size_t scratch_size, items_size, partials_size;

/* Returns 0, or what is wrong: 1 query starts, lengths or live counts, 3 memory. */
int list_attention(const Attention *a, int threads, AttentionWork *work) {
    int64_t group = a->heads / a->cache.kv_heads, n = list_items(a, 0, NULL, NULL);
    if (n < 0) return 1;
    int share = 0;
    if (n < 4 * threads) { /* too few items to keep the threads busy: share the tiles of keys as well */
        int64_t tiles = list_items(a, 1, NULL, NULL);
        share = threads > 1 && tiles > n;
        n = share ? tiles : n;
    }
    int64_t rows = group > TILE_ROWS ? group : TILE_ROWS;
    float *partials = NULL;
    if (share) partials = kept(&kept_partials, &partials_size, n * rows * (a->cache.dim + 2) * sizeof(float));
    Item *items = kept(&kept_items, &items_size, (n + 1) * sizeof(Item));
    if (!items || (share && !partials)) return 3;
    list_items(a, share, items, partials);
    int64_t kv_heads = a->cache.kv_heads, together = !share && n >= 4 * threads * kv_heads ? kv_heads : 1;
    *work = (AttentionWork){a, items, n, together, 0, share};
    return 0;
}

/* Some items that a thread has taken. */
typedef struct {
    int64_t at, end;
} Taken;

/* The tile behind t, of the same item or of the thread's next one; t->item is null before the first. */
static void find_next(AttentionWork *work, Taken *taken, const Tile *t, Tile *next) {
    if (t->item && t->index + 1 < end_of(t->item)) {
        find_tile(work->attention, t->item, t->index + 1, next);
        return;
    }
    if (taken->at == taken->end) {
        taken->at = __atomic_fetch_add(&work->taken, work->together, __ATOMIC_RELAXED);
        taken->end = taken->at + work->together;
    }
    next->item = NULL;
    if (taken->at >= work->count) {
        taken->end = taken->at;
        return;
    }
    const Item *item = work->items + taken->at++;
    find_tile(work->attention, item, item->from, next);
}

void share_attention(AttentionWork *work, int64_t *failed, Team *team) {
    const Attention *a = work->attention;
    const Item *items = work->items;
    const int64_t count = work->count, share = work->share; /* behind the last meeting `work` may be for another layer */
    Scratch *s = kept(&kept_scratch, &scratch_size, sizeof(Scratch));
#pragma omp master
    zero_dead(a);
    if (s) {
        Taken taken = {0};
        Tile *tile = s->tiles, *next = s->tiles + 1;
        for (int64_t d = 0; d < a->cache.dim; d++) s->key_lines[d] = s->keys + d * NV * VL;
        next->item = NULL;
        find_next(work, &taken, next, tile);
        while (tile->item) {
            find_next(work, &taken, tile, next); /* early, so that its keys are on their way meanwhile */
            if (tile->is_found)
                attend(a, tile, next, s);
            else
                __atomic_add_fetch(failed, 1, __ATOMIC_RELAXED);
            Tile *done = tile;
            tile = next, next = done;
        }
    } else {
        __atomic_add_fetch(failed, 1, __ATOMIC_RELAXED);
    }
    meet(team);
    if (!share) return;
#pragma omp for schedule(dynamic) nowait
    for (int64_t i = 0; i < count; i++)
        if (i == 0 || items[i].head != items[i - 1].head || items[i].token != items[i - 1].token) join(a, items + i);
    meet(team);
}

/* Returns 0, or what is wrong: 1 query starts, lengths or live counts, 2 the page table, 3 memory. */
int paged_attention(const Attention *a, int threads) {
    AttentionWork work;
    int64_t failed = 0;
    int error = list_attention(a, threads, &work);
    if (error) return error;
    if (work.count <= 1) threads = 1;
    Team team = {.threads = threads};
    PARALLEL(threads) share_attention(&work, &failed, &team);
    return failed ? 2 : 0;
}
