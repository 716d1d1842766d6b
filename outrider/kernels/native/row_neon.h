/* One token row with four rows of GGUF blocks at a time, in NEON registers.
 *
 * A weight is scale * number + minimum, rounded once. As in blocks_neon.h look-ups put together the bytes of a float,
 * here of number + offset, which takes a single look-up for four weights. The fused operation that multiplies the scale
 * takes the offset away again: it adds `least` = minimum - offset * scale. The result has the same bits as long as
 * `least` is a float32 number. It always is in the kinds without a minimum; for Q4_1 `least_is_exact` tells. Offsets:
 *   Q4_1, Q4_0  128: the number is the third byte of the float, 0x43 the fourth (Q4_0 takes away 136)
 *   Q8_0        2^15 + 128: the number plus 128 is the second byte, 0x47 the fourth
 *
 * Written as machine instructions, as in blocks_neon.h. A step multiplies four weights of each row, scales the next
 * four and looks up the four after those, in turns, because a Neoverse N1 hardly looks past an instruction that waits:
 * in this order both its vector pipes are busy, and in most others a sixth of the time is lost. For the same reason
 * everything that prepares the next block is spread over the steps of this one. Registers:
 *   v0 to v3               sums of the four weight rows
 *   v4 and v5, v6 and v7, v16 and v17, v18 and v19    numbers of a row, and the fourth byte
 *   v12, v13, v14, v31     weights that are looked up
 *   v20 to v23, v24 to v27 weights that are scaled; or `least`, to which scaled weights are added
 *   v28, v15               scales of the four rows in this block, and in the next
 *   v8, v9                 which bytes a look-up takes, in turns
 *   v29, v30               the token row, in turns
 *   v10, v11               for passing use; v15 too before the scales of the next block are there
 * `least` lies in memory, of this block and of the next. */
#pragma once
#include "native.h"

typedef struct {
    uint8_t take[4][16], fourth[16], mask[16];
    float offset[4];
} RowConstants;

#define FOUR(x) {x, x, x, x}
#define SIXTEEN(x) {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}
#define TAKE_THIRD(i) {255, 255, i, 16, 255, 255, i + 1, 16, 255, 255, i + 2, 16, 255, 255, i + 3, 16}
#define TAKE_SECOND(i) {255, i, 255, 16, 255, i + 1, 255, 16, 255, i + 2, 255, 16, 255, i + 3, 255, 16}
#define TAKE_THIRDS {TAKE_THIRD(0), TAKE_THIRD(4), TAKE_THIRD(8), TAKE_THIRD(12)}
#define TAKE_SECONDS {TAKE_SECOND(0), TAKE_SECOND(4), TAKE_SECOND(8), TAKE_SECOND(12)}

static const RowConstants Q4_1_ROW = {TAKE_THIRDS, SIXTEEN(0x43), SIXTEEN(15), FOUR(-128.0f)};
static const RowConstants Q4_0_ROW = {TAKE_THIRDS, SIXTEEN(0x43), SIXTEEN(15), FOUR(-136.0f)};
static const RowConstants Q8_0_ROW = {TAKE_SECONDS, SIXTEEN(0x47), SIXTEEN(128), FOUR(-(0x1p15f + 128.0f))};

/* Whether every block's minimum - 128 * scale is a float32 number. */
INLINE int least_is_exact(const Matrix *m) {
    for (int64_t o = 0; o < m->outputs; o++) {
        const uint8_t *at = (const uint8_t *)m->data + o * m->row_bytes;
        for (int64_t i = 0; i < m->inputs; i += 32, at += 20) {
            uint32_t pair;
            memcpy(&pair, at, 4);
            float32x4_t numbers = vcvt_f32_f16(vreinterpret_f16_u32(vdup_n_u32(pair)));
            double least = (double)numbers[1] - 128.0 * (double)numbers[0];
            if (least != (double)(float)least) return 0;
        }
    }
    return 1;
}

#define ROW_FOUR(i, x, take, scaled, next, found, numbers, fourth)                                                     \
    "fmla v" #next ".4s, v" #found ".4s, v28.s[" #i "]\nfmla v" #i ".4s, v" #x ".4s, v" #scaled ".4s\n"                \
    "tbl v" #found ".16b, {v" #numbers ".16b, v" #fourth ".16b}, v" #take ".16b\n"
/* Steps take turns. `take` and `x`: where the next step finds its own in memory; the others: work in between. */
#define ROW_EVEN(take, x, before, a, b, c, d)                                                                          \
    before ROW_FOUR(0, 29, 8, 20, 24, 12, 4, 5) "ldr q9, [%[constants], #" #take "]\n" a                               \
    ROW_FOUR(1, 29, 8, 21, 25, 13, 6, 7) "ldp q20, q21, [%[least]]\nldr q30, [%[at], #" #x "]\n" b                     \
    ROW_FOUR(2, 29, 8, 22, 26, 14, 16, 17) c                                                                           \
    ROW_FOUR(3, 29, 8, 23, 27, 31, 18, 19) "ldp q22, q23, [%[least], #32]\n" d
#define ROW_ODD(take, x, before, a, b, c, d)                                                                           \
    before ROW_FOUR(0, 30, 9, 24, 20, 12, 4, 5) "ldr q8, [%[constants], #" #take "]\n" a                               \
    ROW_FOUR(1, 30, 9, 25, 21, 13, 6, 7) "ldp q24, q25, [%[least]]\nldr q29, [%[at], #" #x "]\n" b                     \
    ROW_FOUR(2, 30, 9, 26, 22, 14, 16, 17) c                                                                           \
    ROW_FOUR(3, 30, 9, 27, 23, 31, 18, 19) "ldp q26, q27, [%[least], #32]\n" d

/* Bytes of row i, and the numbers that are made of them. */
#define ROW_BYTES(i, register, at) "ldr q" #register ", [%[w" #i "], #" #at "]\n"
#define ROW_BYTES_LOW_Q4_0(i, n) ROW_BYTES(i, n, 2)
#define ROW_BYTES_LOW_Q4_1(i, n) ROW_BYTES(i, n, 4)
#define ROW_BYTES_LOW_Q8_0(i, n) ROW_BYTES(i, n, 2)
#define ROW_BYTES_HIGH_Q4_0(i, n) ROW_BYTES(i, n, 2)
#define ROW_BYTES_HIGH_Q4_1(i, n) ROW_BYTES(i, n, 4)
#define ROW_BYTES_HIGH_Q8_0(i, n) ROW_BYTES(i, n, 18)
#define ROW_FETCH(i) "prfm pldl1keep, [%[w" #i "], %[ahead]]\n"
#define ROW_MASKED(operation, n, mask) operation " v" #n ".16b, v" #n ".16b, v" #mask ".16b\n"
#define ROW_SHIFTED(n) "ushr v" #n ".16b, v" #n ".16b, #4\n"
#define ROW_LOW_Q4_0(n) ROW_MASKED("and", n, 10)
#define ROW_LOW_Q4_1(n) ROW_MASKED("and", n, 10)
#define ROW_LOW_Q8_0(n) ROW_MASKED("eor", n, 10)
#define ROW_HIGH_Q4_0(n) ROW_SHIFTED(n)
#define ROW_HIGH_Q4_1(n) ROW_SHIFTED(n)
#define ROW_HIGH_Q8_0(n) ROW_MASKED("eor", n, 15)
#define ROW_SIZE_Q4_0 "18"
#define ROW_SIZE_Q4_1 "20"
#define ROW_SIZE_Q8_0 "34"

/* What each kind adds to a scaled float, in v10, by the scales in `scales` and, in Q4_1, the minima in v10. */
#define ROW_LEAST_Q4_0(scales) "fmul v10.4s, v11.4s, v" #scales ".4s\n"
#define ROW_LEAST_Q4_1(scales) "fmla v10.4s, v11.4s, v" #scales ".4s\n"
#define ROW_LEAST_Q8_0(scales) ROW_LEAST_Q4_0(scales)
#define ROW_MINIMA_Q4_0 ""
#define ROW_MINIMA_Q4_1 "fcvtl v10.4s, v10.4h\n"
#define ROW_MINIMA_Q8_0 ""
#define ROW_SPREAD(i, to) "dup v11.4s, v10.s[" #i "]\nstr q11, [%[" to "], #16 * " #i "]\n"
#define ROW_LOOK_UP(take)                                                                                              \
    "ldr q8, [%[constants], #" #take "]\n"                                                                             \
    "tbl v12.16b, {v4.16b, v5.16b}, v8.16b\ntbl v13.16b, {v6.16b, v7.16b}, v8.16b\n"                                   \
    "tbl v14.16b, {v16.16b, v17.16b}, v8.16b\ntbl v31.16b, {v18.16b, v19.16b}, v8.16b\n"

/* Before the first step of all: its weights are scaled and the next ones looked up. Scales and minima of two rows share
 * a register of the machine (`a` to `d`), as float16. */
#define ROW_BEGIN(kind)                                                                                                \
    "ldr q5, [%[constants], #64]\nmov v7.16b, v5.16b\nmov v17.16b, v5.16b\nmov v19.16b, v5.16b\n"                      \
    "ldr %w[a], [%[w0]]\nldr %w[b], [%[w1]]\nldr %w[c], [%[w2]]\nldr %w[d], [%[w3]]\n"                                 \
    "orr %[a], %[a], %[b], lsl #32\norr %[c], %[c], %[d], lsl #32\nfmov d10, %[a]\nmov v10.d[1], %[c]\n"               \
    "uzp1 v11.8h, v10.8h, v10.8h\nuzp2 v10.8h, v10.8h, v10.8h\nfcvtl v28.4s, v11.4h\n" ROW_MINIMA_##kind               \
    "ldr q11, [%[constants], #96]\n" ROW_LEAST_##kind(28)                                                              \
    ROW_SPREAD(0, "least") ROW_SPREAD(1, "least") ROW_SPREAD(2, "least") ROW_SPREAD(3, "least")                        \
    "ldr q10, [%[constants], #80]\n" ROW_BYTES_LOW_##kind(0, 4) ROW_BYTES_LOW_##kind(1, 6)                             \
    ROW_BYTES_LOW_##kind(2, 16) ROW_BYTES_LOW_##kind(3, 18)                                                            \
    ROW_LOW_##kind(4) ROW_LOW_##kind(6) ROW_LOW_##kind(16) ROW_LOW_##kind(18)                                          \
    ROW_LOOK_UP(0) "ldp q20, q21, [%[least]]\nldp q22, q23, [%[least], #32]\n"                                         \
    "fmla v20.4s, v12.4s, v28.s[0]\nfmla v21.4s, v13.4s, v28.s[1]\n"                                                   \
    "fmla v22.4s, v14.4s, v28.s[2]\nfmla v23.4s, v31.4s, v28.s[3]\n"                                                   \
    ROW_LOOK_UP(16) "ldp q24, q25, [%[least]]\nldp q26, q27, [%[least], #32]\nldr q8, [%[constants], #32]\n"

#define ROW_BLOCK(kind)                                                                                                \
    ROW_EVEN(48, 16, "subs %[left], %[left], #1\ncsel %[step], %[step], %[jump], ne\n",                                \
             "ldr %w[a], [%[w0], %[step]]\n", "ldr %w[b], [%[w1], %[step]]\n",                                         \
             "ldr %w[c], [%[w2], %[step]]\nldr q15, [%[constants], #80]\n", "ldr %w[d], [%[w3], %[step]]\n")           \
    ROW_ODD(0, 32, "orr %[a], %[a], %[b], lsl #32\n",                                                                  \
            "orr %[c], %[c], %[d], lsl #32\n" ROW_BYTES_HIGH_##kind(0, 4),                                             \
            "fmov d10, %[a]\n" ROW_BYTES_HIGH_##kind(1, 6),                                                            \
            ROW_BYTES_HIGH_##kind(2, 16), "mov v10.d[1], %[c]\n" ROW_BYTES_HIGH_##kind(3, 18))                         \
    ROW_EVEN(16, 48, ROW_HIGH_##kind(4) ROW_HIGH_##kind(6), ROW_HIGH_##kind(16), ROW_HIGH_##kind(18), "",              \
             "uzp1 v11.8h, v10.8h, v10.8h\n")                                                                          \
    ROW_ODD(32, 64, "", "uzp2 v10.8h, v10.8h, v10.8h\n", "fcvtl v15.4s, v11.4h\n", "",                                 \
            ROW_MINIMA_##kind "ldr q11, [%[constants], #96]\n")                                                        \
    ROW_EVEN(48, 80, ROW_FETCH(0) ROW_FETCH(1), "add %[w0], %[w0], %[step]\nadd %[w1], %[w1], %[step]\n",              \
             "add %[w2], %[w2], %[step]\nadd %[w3], %[w3], %[step]\n", "", ROW_LEAST_##kind(15))                       \
    ROW_ODD(0, 96, ROW_SPREAD(0, "spare"), ROW_SPREAD(1, "spare") ROW_BYTES_LOW_##kind(0, 4),                          \
            ROW_SPREAD(2, "spare") ROW_BYTES_LOW_##kind(1, 6), ROW_SPREAD(3, "spare") ROW_BYTES_LOW_##kind(2, 16),     \
            "ldr q10, [%[constants], #80]\neor %[least], %[least], #64\neor %[spare], %[spare], #64\n"                 \
            ROW_BYTES_LOW_##kind(3, 18))                                                                               \
    ROW_EVEN(16, 112, ROW_LOW_##kind(4) ROW_LOW_##kind(6), ROW_LOW_##kind(16), ROW_LOW_##kind(18), "",                 \
             "mov v28.16b, v15.16b\n")                                                                                 \
    ROW_ODD(32, 0, "add %[at], %[at], #128\n", ROW_FETCH(2) ROW_FETCH(3), "", "", "")

/* After the last block of four rows come the next four rows; the very last block is opened once more in place of one
 * behind the end. */
#define ROW_MULTIPLY(kind)                                                                                             \
    __asm__ volatile(ROW_BEGIN(kind)                                                                                   \
                     "1:\nmov %[at], %[x]\nldr q29, [%[at]]\nmov %[left], %[blocks]\n"                                 \
                     "mov %[step], #" ROW_SIZE_##kind "\n"                                                             \
                     "movi v0.4s, #0\nmovi v1.4s, #0\nmovi v2.4s, #0\nmovi v3.4s, #0\n"                                \
                     "2:\n" ROW_BLOCK(kind) "cbnz %[left], 2b\n"                                                       \
                     "stp q0, q1, [%[sums]], #32\nstp q2, q3, [%[sums]], #32\nsub %[groups], %[groups], #1\n"          \
                     "cmp %[groups], #1\ncsel %[jump], %[jump], xzr, ne\ncbnz %[groups], 1b\n"                         \
                     : [w0] "+r"(w[0]), [w1] "+r"(w[1]), [w2] "+r"(w[2]), [w3] "+r"(w[3]), [groups] "+r"(groups),      \
                       [sums] "+r"(sums), [jump] "+r"(jump), [least] "+r"(least), [spare] "+r"(spare),                 \
                       [at] "=&r"(at), [left] "=&r"(left), [step] "=&r"(step), [a] "=&r"(halves[0]),                   \
                       [b] "=&r"(halves[1]), [c] "=&r"(halves[2]), [d] "=&r"(halves[3])                                \
                     : [constants] "r"(&kind##_ROW), [x] "r"(x), [blocks] "r"(blocks), [ahead] "r"(ahead)              \
                     : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11",       \
                       "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24",      \
                       "v25", "v26", "v27", "v28", "v29", "v30", "v31")

/* Sums of products of `groups` times four weight rows with one token row, in the order of `product_tile`. `w`: the
 * first four rows; `ahead`: from a weight row to the one four further on, which is fetched meanwhile. The vector behind
 * the token row is read too, and not used. */
INLINE void multiply_rows(const uint8_t **w, int64_t groups, int64_t blocks, int64_t size, int64_t ahead,
                          const float *x, vf *sums, const int kind) {
    float both[32] __attribute__((aligned(128)));
    float *spare = both, *least = both + 16;
    const float *at;
    int64_t left, step, halves[4], jump = groups > 1 ? ahead - (blocks - 1) * size : 0; /* from last to first block */
    if (kind == Q4_1) ROW_MULTIPLY(Q4_1);
    if (kind == Q4_0) ROW_MULTIPLY(Q4_0);
    if (kind == Q8_0) ROW_MULTIPLY(Q8_0);
}
