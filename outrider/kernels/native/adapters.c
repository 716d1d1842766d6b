/* What adapters add to the products of token rows (kernels/adapters.py). A row is computed alone, in one order. */
#include "native.h"

#define TALL 4    /* ranks whose sums are made together, so that a row is read once for them */
#define WIDE 64   /* output features whose sums stay in registers */

/* out[r] = a[r] . x for `count` rows of a, at most TALL. */
static void dots(const float *a, int64_t stride, const float *x, int64_t width, int64_t count, float *out) {
    vf sums[TALL] = {0};
    int64_t at = 0;
    for (; at + VL <= width; at += VL) {
        vf value = *(const vfu *)(x + at);
        for (int64_t r = 0; r < count; r++) sums[r] += *(const vfu *)(a + r * stride + at) * value;
    }
    for (int64_t r = 0; r < count; r++) {
        float total = 0;
        for (int lane = 0; lane < VL; lane++) total += sums[r][lane];
        for (int64_t rest = at; rest < width; rest++) total += a[r * stride + rest] * x[rest];
        out[r] = total;
    }
}

/* inner [rows in their order, count, width]: products with the first factors. places: [slots, num_targets, 3]. */
void reduce_adapters(const float *x, int64_t x_stride, const float *numbers, const int64_t *places,
                     const int64_t *slots, const int64_t *order, float *inner, int64_t rows, int64_t inputs,
                     int64_t first_target, int64_t count, int64_t num_targets, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t at = 0; at < rows; at++) {
        if (slots[at] < 0) continue;
        const float *row = x + order[at] * x_stride;
        for (int64_t target = 0; target < count; target++) {
            const int64_t *place = places + (slots[at] * num_targets + first_target + target) * 3;
            const float *a = numbers + place[0];
            float *out = inner + (at * count + target) * width;
            for (int64_t r = 0; r < place[2]; r += TALL)
                dots(a + r * inputs, inputs, row, inputs, place[2] - r < TALL ? place[2] - r : TALL, out + r);
        }
    }
}

/* out[i] += scale * sum of h[r] b[r][i], for output features that follow each other. */
static void expand(const float *h, const float *b, int64_t rank, int64_t stride, float scale, float *out,
                   int64_t width) {
    for (int64_t from = 0; from < width; from += WIDE) {
        float sums[WIDE] = {0};
        int64_t count = width - from < WIDE ? width - from : WIDE;
        for (int64_t r = 0; r < rank; r++)
            for (int64_t i = 0; i < count; i++) sums[i] += h[r] * b[r * stride + from + i];
        for (int64_t i = 0; i < count; i++) out[from + i] += scale * sums[i];
    }
}

/* bounds: [num_targets, 2], the output features of a layer that each target is; `out` has those from `first` on. */
void add_adapters(const float *inner, const float *numbers, const int64_t *places, const float *scales,
                  const int64_t *bounds, const int64_t *slots, const int64_t *order, float *out, int64_t out_stride,
                  int64_t rows, int64_t first, int64_t features, int64_t first_target, int64_t count,
                  int64_t num_targets, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t at = 0; at < rows; at++) {
        if (slots[at] < 0) continue;
        for (int64_t place = 0; place < count; place++) {
            int64_t target = first_target + place, entry = slots[at] * num_targets + target;
            int64_t begin = bounds[2 * target], end = bounds[2 * target + 1], rank = places[entry * 3 + 2];
            int64_t low = begin > first ? begin : first, high = end < first + features ? end : first + features;
            if (rank > 0 && low < high)
                expand(inner + (at * count + place) * width, numbers + places[entry * 3 + 1] + low - begin, rank,
                       end - begin, scales[entry], out + order[at] * out_stride + low - first, high - low);
        }
    }
}
