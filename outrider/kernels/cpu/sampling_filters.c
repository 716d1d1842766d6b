/* Top-k and top-p: the distance up to which tokens are kept, found by counting, without a sort. Twin of
 * sample/filters.py: a token weighs what `probability_mass` says there, in integers, and everything tied with a
 * threshold is kept.
 */
#include "sampling.h"

#define WEIGHTLESS 28.5f /* a distance from which on tokens weigh nothing */

typedef uint64_t vq __attribute__((vector_size(VL * 4)));

/* exp(scaled) in units of 2^-40: of even lanes, and of odd ones. The steps are those of `probability_mass`. */
INLINE void masses_of(vf scaled, vq *even, vq *odd) {
    vf power = scaled * 1.4426950216293335f;
    power = pick(power < -64.0f, splat(-64.0f), power);
    vi whole = __builtin_convertvector(power, vi);
    whole += __builtin_convertvector(whole, vf) > power; /* the floor: a comparison is -1 where it holds */
    vf rest = power - __builtin_convertvector(whole, vf), value = splat(0.0002161380834877491f);
    value = value * rest + 0.0012467376654967666f;
    value = value * rest + 0.009675532579421997f;
    value = value * rest + 0.05548521876335144f;
    value = value * rest + 0.24022932350635529f;
    value = value * rest + 0.6931470632553101f;
    value = value * rest + 1.0f;
    vq mantissa = (vq)__builtin_convertvector(value * 8388608.0f, vi);
    vi steps = -whole;
    vq shift = (vq)((steps & (steps < 64)) | (63 & ~(steps < 64)));
    *even = ((mantissa & 0xffffffff) << 17) >> (shift & 0xffffffff);
    *odd = ((mantissa >> 32) << 17) >> (shift >> 32);
}

/* The mass of the tokens that the row keeps, of groups [first, last). */
int64_t weigh_block(const LogitRow *r, int64_t vocab, int64_t first, int64_t last) {
    float floor = scaled_at(r->furthest) > -WEIGHTLESS ? scaled_at(r->furthest) : -WEIGHTLESS, room[GROUP];
    vq total = {0};
    for (int64_t g = first; g < last; g++) {
        if (scaled_of(r, r->groups[g]) < floor) continue;
        const float *own = load_group(r->logits, g * GROUP, vocab, room);
        for (int i = 0; i < GROUP; i += VL) {
            vq even, odd;
            vf scaled = (load(own + i) - r->greatest) / r->temperature;
            masses_of(pick(scaled < floor, splat(-64.0f), scaled), &even, &odd);
            total += even + odd;
        }
    }
    int64_t sum = 0;
    for (int i = 0; i < VL / 2; i++) sum += (int64_t)total[i];
    return sum;
}

/* The distances of all tokens that are no further than `limit`. Returns how many there are. */
static int64_t list_distances(const Sampling *s, const LogitRow *r, uint32_t limit, uint32_t *keys) {
    int64_t found = 0;
    for (int64_t g = 0; g < s->groups; g++) {
        float room[GROUP];
        if (distance_of(r, r->groups[g]) > limit) continue;
        int count = (int)lower(GROUP, s->in->vocab - g * GROUP);
        const float *own = load_group(r->logits, g * GROUP, s->in->vocab, room);
        for (int i = 0; i < GROUP; i += VL) {
            uint32_t lanes[VL];
            vi distances = (vi)((load(own + i) - r->greatest) / r->temperature) & 0x7fffffff;
            memcpy(lanes, &distances, sizeof lanes);
            for (int l = 0; l < VL && i + l < count; l++) {
                keys[found] = lanes[l];
                found += lanes[l] <= limit;
            }
        }
    }
    return found;
}

/* How keys are told apart in one round of a search: by their place between 0 and the greatest, then byte by byte. */
typedef struct {
    float scale; /* 0: by a byte */
    int shift;
} Digit;

#define PLACES 2048

INLINE uint32_t digit_of(Digit digit, uint32_t key) {
    if (digit.scale == 0) return key >> digit.shift & 255;
    float place = float_of(key) * digit.scale;
    return place < PLACES - 1 ? (uint32_t)place : PLACES - 1;
}

/* The masses of keys, or their number, added to those of their digits. */
static void add_weights(const uint32_t *keys, int64_t count, Digit digit, int by_mass, int64_t *sums) {
    for (int64_t at = 0; at < count; at += VL) {
        uint32_t own[VL] = {0};
        uint64_t lanes[VL];
        int64_t some = lower(VL, count - at);
        memcpy(own, keys + at, some * sizeof(uint32_t));
        if (by_mass) {
            vi distances;
            vq even, odd;
            memcpy(&distances, own, sizeof own);
            masses_of(-(vf)distances, &even, &odd);
            for (int i = 0; i < VL / 2; i++) lanes[2 * i] = even[i], lanes[2 * i + 1] = odd[i];
        }
        for (int64_t i = 0; i < some; i++) sums[digit_of(digit, own[i])] += by_mass ? (int64_t)lanes[i] : 1;
    }
}

/* One round: keeps the keys of the digit that the search ends in. Returns how many there are. */
INLINE int64_t search_digit(uint32_t *keys, int64_t count, Digit digit, int by_mass, double limit, int64_t *before) {
    int64_t sums[PLACES] = {0}, found = 0;
    uint32_t at = 0, last = digit.scale == 0 ? 255 : PLACES - 1;
    add_weights(keys, count, digit, by_mass, sums);
    while (at < last && (double)(*before + sums[at]) < limit) *before += sums[at++];
    for (int64_t i = 0; i < count; i++) {
        uint32_t key = keys[i];
        keys[found] = key;
        found += digit_of(digit, key) == at;
    }
    return found;
}

/* The greatest key such that all lesser ones weigh less than `limit`, which all together reach. A key weighs its mass,
 * or 1. Destroys the keys. */
static uint32_t search(uint32_t *keys, int64_t count, int by_mass, double limit) {
    int64_t before = 0;
    uint32_t greatest = 0, infinity = bits_of(INFINITY);
    for (int64_t i = 0; i < count; i++)
        if (keys[i] > greatest && keys[i] < infinity) greatest = keys[i];
    float scale = (PLACES - 1) / float_of(greatest);
    if (isfinite(scale)) count = search_digit(keys, count, (Digit){scale, 0}, by_mass, limit, &before);
    for (int shift = 24; shift >= 0 && count > 1; shift -= 8)
        count = search_digit(keys, count, (Digit){0, shift}, by_mass, limit, &before);
    return keys[0];
}

/* Among tokens that are no further than `limit`, which weigh `total` together with others that are certainly left out.
 * The likeliest token is always kept. */
static uint32_t search_top_p(const Sampling *s, const LogitRow *r, uint32_t limit, int64_t total, uint32_t *keys) {
    double mass = (double)total * (double)s->state->top_p[r->of];
    return mass > 0 ? search(keys, list_distances(s, r, limit, keys), 1, mass) : 0;
}

/* The furthest kept token of a row with a top-k, and perhaps a min-p and a top-p. As many groups as k have a token that
 * is no further than the k-th nearest group, so the k-th nearest token is not further either. */
uint32_t furthest_of_top_k(const Sampling *s, const LogitRow *r, uint32_t *keys) {
    int64_t top_k = s->state->top_k[r->of], count;
    uint32_t limit = bits_of(INFINITY);
    if (top_k <= s->groups) {
        for (int64_t g = 0; g < s->groups; g++) keys[g] = distance_of(r, r->groups[g]);
        limit = search(keys, s->groups, 0, (double)top_k);
    }
    count = list_distances(s, r, limit, keys);
    limit = search(keys, count, 0, (double)top_k);
    limit = limit < r->furthest ? limit : r->furthest;
    if (!(r->flags & TOP_P)) return limit;
    count = list_distances(s, r, limit, keys);
    int64_t sums[256] = {0}, total = 0;
    add_weights(keys, count, (Digit){0, 24}, 1, sums);
    for (int i = 0; i < 256; i++) total += sums[i];
    return search_top_p(s, r, limit, total, keys);
}

/* The furthest kept token of a row with a top-p whose kept tokens weigh `total`. A token is left out for certain if the
 * whole vocabulary, at its weight, would weigh less than what top-p leaves out; few are left to look at then. */
uint32_t furthest_of_top_p(const Sampling *s, const LogitRow *r, int64_t total, uint32_t *keys) {
    double light = (double)total * (1.0 - (double)s->state->top_p[r->of]) * 0.99 / (double)s->in->vocab;
    float distance = light > 1.0 ? (float)(40.0 * 0.6931471805599453 - log(light)) + 0.01f : WEIGHTLESS;
    uint32_t limit = bits_of(distance < WEIGHTLESS ? (distance > 0 ? distance : 0.0f) : WEIGHTLESS);
    return search_top_p(s, r, limit < r->furthest ? limit : r->furthest, total, keys);
}
