/* What adapters add to the products of token rows (kernels/adapters.py). Token rows of one adapter are computed together,
 * so that its numbers are read once for them. Every sum is made in one order, whatever is computed beside it.
 */
#include "native.h"

#define ROWS 4                      /* token rows computed together, at most */
#define SUMS (NV == 4 ? 16 : 8)     /* that the registers hold beside their inputs */
#define RANKS(rows) ((rows) == 1 ? 8 : SUMS / (rows)) /* of the first factor computed together */
#define CHUNK 8                     /* ranks that a thread takes at once */
#define FEATURES 256                /* output features that a thread takes at once */
#define FETCHED 4                   /* segments whose numbers a thread fetches before it needs them */

int64_t count_segments(const Adapters *adapters) {
    int64_t count = 0;
    while (count < adapters->rows && adapters->segments[3 * count] < adapters->rows) count++;
    return count;
}

/* Up to ROWS token rows of one adapter: what is read of each, and what is written. */
typedef struct {
    const float *from[ROWS];
    float *to[ROWS];
} Rows;

/* to[t][r] = a[r] . from[t]. */
INLINE void reduce_tile(const Rows *rows, const float *a, int64_t inputs, const int count, const int ranks) {
    vf sums[VL > SUMS ? VL : SUMS] = {{0}};
    int64_t i = 0;
    for (; i + VL <= inputs; i += VL) {
        vf units[CHUNK];
        UNROLL for (int r = 0; r < ranks; r++) units[r] = load(a + r * inputs + i);
        UNROLL for (int t = 0; t < count; t++) {
            vf x = load(rows->from[t] + i);
            UNROLL for (int r = 0; r < ranks; r++) sums[t * ranks + r] = fused(x, units[r], sums[t * ranks + r]);
        }
    }
    if (i < inputs)
        UNROLL for (int t = 0; t < count; t++) {
            vf x = load_tail(rows->from[t] + i, (int)(inputs - i));
            UNROLL for (int r = 0; r < ranks; r++)
                sums[t * ranks + r] = fused(x, load_tail(a + r * inputs + i, (int)(inputs - i)), sums[t * ranks + r]);
        }
    float totals[VL > SUMS ? VL : SUMS];
    UNROLL for (int s = 0; s < count * ranks; s += VL) store(totals + s, sum_each(sums + s));
    for (int t = 0; t < count; t++)
        for (int r = 0; r < ranks; r++) rows->to[t][r] = totals[t * ranks + r];
}

INLINE void reduce_rows(Rows rows, const float *a, int64_t inputs, int64_t num_ranks, const int count) {
    int64_t r = 0;
    for (; r + RANKS(count) <= num_ranks; r += RANKS(count)) {
        reduce_tile(&rows, a + r * inputs, inputs, count, RANKS(count));
        UNROLL for (int t = 0; t < count; t++) rows.to[t] += RANKS(count);
    }
    for (; r < num_ranks; r++) {
        reduce_tile(&rows, a + r * inputs, inputs, count, 1);
        UNROLL for (int t = 0; t < count; t++) rows.to[t] += 1;
    }
}

/* Ranks [first, last) of one segment and target. */
static void reduce_segment(const Change *c, const int64_t *segment, int64_t target, const float *x, int64_t x_stride,
                           int64_t inputs, int64_t first, int64_t last) {
    const Adapters *all = c->adapters;
    const int64_t *place = all->places + (segment[2] * all->num_targets + c->targets.first + target) * 3;
    if (last > place[2]) last = place[2];
    if (first >= last) return;
    const float *a = all->numbers + place[0] + first * inputs;
    for (int64_t at = segment[0], count; at < segment[1]; at += count) {
        Rows rows;
        count = segment[1] - at >= 4 ? 4 : segment[1] - at >= 2 ? 2 : 1;
        for (int64_t t = 0; t < count; t++) {
            rows.from[t] = x + all->order[at + t] * x_stride;
            rows.to[t] = c->inner + ((at + t) * c->targets.count + target) * all->max_rank + first;
        }
        switch (count) {
        case 4: reduce_rows(rows, a, inputs, last - first, 4); break;
        case 2: reduce_rows(rows, a, inputs, last - first, 2); break;
        default: reduce_rows(rows, a, inputs, last - first, 1);
        }
    }
}

void share_reduce(const Change *c, const float *x, int64_t x_stride, int64_t inputs, Team *team) {
    const int64_t chunks = (c->adapters->max_rank + CHUNK - 1) / CHUNK, count = c->targets.count;
    Loop loop = start_loop(team, c->num_segments * count * chunks);
    for (int64_t i; (i = next_piece(&loop)) >= 0;) {
        const int64_t *segment = c->adapters->segments + i / (count * chunks) * 3, chunk = i % chunks;
        if (segment[2] >= 0)
            reduce_segment(c, segment, i / chunks % count, x, x_stride, inputs, chunk * CHUNK, (chunk + 1) * CHUNK);
    }
    meet(team);
}

/* The second factor of a slot and target, for those of its output features that lie within [from, to). */
typedef struct {
    const float *b; /* of the first of them */
    int64_t rank, stride, first, count; /* first: within the product */
    float scale;
} Second;

INLINE Second find_second(const Change *c, int64_t slot, int64_t target, int64_t from, int64_t to) {
    const Adapters *all = c->adapters;
    const int64_t entry = slot * all->num_targets + c->targets.first + target;
    const int64_t *place = all->places + entry * 3, *bounds = all->bounds + (c->targets.first + target) * 2;
    const int64_t begin = bounds[0] - c->first_feature, end = bounds[1] - c->first_feature;
    const int64_t low = begin > from ? begin : from, high = end < to ? end : to;
    return (Second){all->numbers + place[1] + low - begin, high > low ? place[2] : 0, end - begin, low, high - low,
                    all->scales[entry]};
}

/* to[t][i] += scale * sum of from[t][r] b[r][i], for `vectors` of features, of the last of which `live` are there. */
INLINE void expand_tile(const Rows *rows, const Second *s, int64_t at, int live, const int count, const int vectors) {
    vf sums[SUMS] = {{0}};
    for (int64_t r = 0; r < s->rank; r++) {
        const float *b = s->b + r * s->stride + at;
        vf units[NV];
        UNROLL for (int v = 0; v < vectors; v++) units[v] = live < VL ? load_tail(b, live) : load(b + v * VL);
        UNROLL for (int t = 0; t < count; t++) {
            vf h = splat(rows->from[t][r]);
            UNROLL for (int v = 0; v < vectors; v++)
                sums[t * vectors + v] = fused(h, units[v], sums[t * vectors + v]);
        }
    }
    UNROLL for (int t = 0; t < count; t++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *out = rows->to[t] + at + v * VL;
            vf added = s->scale * sums[t * vectors + v];
            if (live == VL)
                store(out, load(out) + added);
            else
                for (int i = 0; i < live; i++) out[i] += added[i];
        }
}

#define VECTORS(rows) (SUMS / (rows) < NV ? SUMS / (rows) : NV)

INLINE void expand_rows(const Rows *rows, const Second *s, const int count) {
    int64_t at = 0;
    for (; at + VECTORS(count) * VL <= s->count; at += VECTORS(count) * VL)
        expand_tile(rows, s, at, VL, count, VECTORS(count));
    for (; at + VL <= s->count; at += VL) expand_tile(rows, s, at, VL, count, 1);
    if (at < s->count) expand_tile(rows, s, at, (int)(s->count - at), count, 1);
}

/* Adds to y [c->num_rows, stride] what one segment has there. */
static void add_segment(const Change *c, const int64_t *segment, float *y, int64_t stride, int64_t from, int64_t to) {
    const Adapters *all = c->adapters;
    for (int64_t target = 0; target < c->targets.count; target++) {
        const Second second = find_second(c, segment[2], target, from, to);
        if (second.rank == 0) continue;
        Rows rows;
        int found = 0;
        for (int64_t at = segment[0]; at < segment[1]; at++) {
            const int64_t row = all->order[at] - c->first_row;
            if (row >= 0 && row < c->num_rows) {
                rows.from[found] = c->inner + (at * c->targets.count + target) * all->max_rank;
                rows.to[found++] = y + row * stride + second.first;
            }
            if (found == ROWS) expand_rows(&rows, &second, ROWS), found = 0;
        }
        for (int t = 0; t < found; t++) {
            const Rows one = {{rows.from[t]}, {rows.to[t]}};
            expand_rows(&one, &second, 1);
        }
    }
}

void add_features(const Change *c, float *y, int64_t stride, int64_t from, int64_t to) {
    for (int64_t i = 0; i < c->num_segments; i++)
        if (c->adapters->segments[3 * i + 2] >= 0) add_segment(c, c->adapters->segments + 3 * i, y, stride, from, to);
}

void fetch_features(const Change *c, int64_t from, int64_t to) {
    for (int64_t i = 0, done = 0; i < c->num_segments && done < FETCHED; i++) {
        const int64_t slot = c->adapters->segments[3 * i + 2];
        if (slot < 0) continue;
        done++;
        for (int64_t target = 0; target < c->targets.count; target++) {
            const Second s = find_second(c, slot, target, from, to);
            for (int64_t r = 0; r < s.rank; r++)
                for (int64_t at = 0; at < s.count; at += 16) __builtin_prefetch(s.b + r * s.stride + at);
        }
    }
}

/* inner [rows in their order, targets, max_rank]: products with the first factors. */
void reduce_adapters(const Adapters *adapters, const Targets *targets, const float *x, int64_t x_stride, int64_t inputs,
                     float *inner, int threads) {
    const Change change = {adapters, *targets, count_segments(adapters), inner, 0, adapters->rows, 0};
    if (adapters->rows * targets->count * adapters->max_rank * inputs < 65536) threads = 1;
    Team team = {.threads = threads};
    PARALLEL(threads) share_reduce(&change, x, x_stride, inputs, &team);
}

/* out: [rows, features], those of a layer's output features from `first` on. */
void add_adapters(const Adapters *adapters, const Targets *targets, const float *inner, float *out, int64_t out_stride,
                  int64_t first, int64_t features, int threads) {
    const Change change = {adapters, *targets, count_segments(adapters), (float *)inner, 0, adapters->rows, first};
    const int64_t pieces = (features + FEATURES - 1) / FEATURES;
    if (adapters->rows * adapters->max_rank * features < 65536) threads = 1;
    Team team = {.threads = threads};
    PARALLEL(threads) {
        Loop loop = start_loop(&team, change.num_segments * pieces);
        for (int64_t i; (i = next_piece(&loop)) >= 0;) {
            const int64_t *segment = adapters->segments + i / pieces * 3, from = i % pieces * FEATURES;
            const int64_t to = features - from < FEATURES ? features : from + FEATURES;
            if (segment[2] >= 0) add_segment(&change, segment, out, out_stride, from, to);
        }
    }
}
