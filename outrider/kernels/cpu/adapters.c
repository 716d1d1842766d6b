/* What adapters add to the products of token rows (kernels/adapter_products.py). Rows of one adapter are computed together,
 * so that its numbers are read once for them. Every sum is made in one order, whatever is computed beside it.
 */
#include "native.h"

#define ROWS 4                  /* token rows computed together, at most */
#define SUMS (NV == 4 ? 16 : 8) /* that the registers hold beside their inputs */
#define RANKS(rows) ((rows) == 1 ? 8 : SUMS / (rows))                 /* of first factors computed together */
#define VECTORS(rows) (SUMS / (rows) < NV ? SUMS / (rows) : NV)       /* of output features computed together */
#define CHUNK 8                 /* ranks that a thread takes at once */
#define FEATURES 256            /* output features that a thread takes at once */

int64_t count_segments(const Adapters *adapters) {
    int64_t count = 0;
    while (count < adapters->rows && adapters->segments[3 * count] < adapters->rows) count++;
    return count;
}

/* Token rows in the order of their slots, as RowSlots has them: slot by slot, from the least on. */
void sort_slots(const int64_t *slots, int64_t rows, int64_t segment_rows, int64_t *sorted, int64_t *order,
                int64_t *segments, int64_t *num_segments) {
    int64_t place = 0, count = 0, slot = INT64_MIN, next;
    for (int64_t row = 0; row < rows; row++) slot = row == 0 || slots[row] < slot ? slots[row] : slot;
    for (; place < rows; slot = next) {
        const int64_t first = place;
        next = INT64_MAX;
        for (int64_t row = 0; row < rows; row++)
            if (slots[row] == slot)
                sorted[place] = slot, order[place++] = row;
            else if (slots[row] > slot && slots[row] < next)
                next = slots[row];
        for (int64_t begin = first; begin < place; begin += segment_rows, count++) {
            segments[3 * count] = begin;
            segments[3 * count + 1] = place - begin < segment_rows ? place : begin + segment_rows;
            segments[3 * count + 2] = slot;
        }
    }
    *num_segments = count;
    for (; count < rows; count++) segments[3 * count] = segments[3 * count + 1] = rows, segments[3 * count + 2] = -1;
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
    vf held[VL > SUMS ? VL : SUMS]; /* a copy: sums that are summed up in place do not stay in registers above */
    UNROLL for (int s = 0; s < (VL > SUMS ? VL : SUMS); s++) held[s] = sums[s];
    UNROLL for (int s = 0; s < count * ranks; s += VL) store(totals + s, sum_each(held + s));
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

INLINE void expand_rows(const Rows *rows, const Second *s, const int count) {
    int64_t at = 0;
    for (; at + VECTORS(count) * VL <= s->count; at += VECTORS(count) * VL)
        expand_tile(rows, s, at, VL, count, VECTORS(count));
    for (; at + VL <= s->count; at += VL) expand_tile(rows, s, at, VL, count, 1);
    if (at < s->count) expand_tile(rows, s, at, (int)(s->count - at), count, 1);
}

/* Adds to y what one segment has for the output features [from, to) of the product. */
static void add_segment(const Change *c, const int64_t *segment, float *y, int64_t y_stride, int64_t from, int64_t to) {
    const Adapters *all = c->adapters;
    for (int64_t target = 0; target < c->targets.count; target++) {
        const Second second = find_second(c, segment[2], target, from, to);
        if (second.rank == 0) continue;
        for (int64_t at = segment[0], count; at < segment[1]; at += count) {
            Rows rows;
            count = segment[1] - at >= 4 ? 4 : segment[1] - at >= 2 ? 2 : 1;
            for (int64_t t = 0; t < count; t++) {
                rows.from[t] = c->inner + ((at + t) * c->targets.count + target) * all->max_rank;
                rows.to[t] = y + all->order[at + t] * y_stride + second.first;
            }
            switch (count) {
            case 4: expand_rows(&rows, &second, 4); break;
            case 2: expand_rows(&rows, &second, 2); break;
            default: expand_rows(&rows, &second, 1);
            }
        }
    }
}

void share_add(const Change *c, float *y, int64_t y_stride, int64_t features, Team *team) {
    const int64_t blocks = (features + FEATURES - 1) / FEATURES;
    Loop loop = start_loop(team, c->num_segments * blocks);
    for (int64_t i; (i = next_piece(&loop)) >= 0;) {
        const int64_t *segment = c->adapters->segments + i / blocks * 3, from = i % blocks * FEATURES;
        if (segment[2] >= 0)
            add_segment(c, segment, y, y_stride, from, features - from < FEATURES ? features : from + FEATURES);
    }
    meet(team);
}

/* inner [rows in their order, targets, max_rank]: products with the first factors. */
void reduce_adapters(const Adapters *adapters, const Targets *targets, const float *x, int64_t x_stride, int64_t inputs,
                     float *inner, int threads) {
    const Change change = {adapters, *targets, count_segments(adapters), inner, 0};
    if (adapters->rows * targets->count * adapters->max_rank * inputs < 65536) threads = 1;
    Team team = {.threads = threads};
    PARALLEL(threads) share_reduce(&change, x, x_stride, inputs, &team);
}

/* out: [rows, features], those of a layer's output features from `first` on. */
void add_adapters(const Adapters *adapters, const Targets *targets, const float *inner, float *out, int64_t out_stride,
                  int64_t first, int64_t features, int threads) {
    const Change change = {adapters, *targets, count_segments(adapters), (float *)inner, first};
    if (adapters->rows * adapters->max_rank * features < 65536) threads = 1;
    Team team = {.threads = threads};
    PARALLEL(threads) share_add(&change, out, out_stride, features, &team);
}
