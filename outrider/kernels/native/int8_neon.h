/* Four weight rows with token rows rounded to 8 bits, by the dot products of ARM: included by int8.c alone. */
#pragma once

typedef float32x4_t Four;

INLINE Four fused_four(Four a, Four b, Four c) { return vfmaq_f32(c, a, b); }
INLINE Four load_four(const float *at) { return vld1q_f32(at); }

/* Sums begin at this number. Its bits with a sum added, read as a float, are those of 3 * 2^22 plus the sum: to take
 * that away is quicker than to convert an integer. */
#define START 0x1.8p23f

/* The same block of four weight rows: 32 numbers of each, the scales, and what is added to each scaled number. */
typedef struct {
    int8x16_t low[COLS], high[COLS];
    Four scale, least;
} Weights8;

INLINE Weights8 open_blocks(const uint8_t *const *at, const int kind) {
    Weights8 w;
    uint32x4_t heads[COLS]; /* in lane 0 a scale and, in Q4_1, a minimum. Through memory they would come much later. */
    for (int c = 0; c < COLS; c++) {
        uint32_t head;
        memcpy(&head, at[c], 4);
        heads[c] = vsetq_lane_u32(head, vdupq_n_u32(0), 0);
        uint8x16_t first = vld1q_u8(at[c] + (kind == INT8_Q4_1 ? 4 : 2));
        if (kind == INT8_Q8_0) {
            w.low[c] = vreinterpretq_s8_u8(first), w.high[c] = vld1q_s8((const int8_t *)at[c] + 18);
        } else {
            w.low[c] = vreinterpretq_s8_u8(vandq_u8(first, vdupq_n_u8(15)));
            w.high[c] = vreinterpretq_s8_u8(vshrq_n_u8(first, 4));
        }
    }
    uint64x2_t low = vreinterpretq_u64_u32(vzip1q_u32(heads[0], heads[1]));
    uint64x2_t high = vreinterpretq_u64_u32(vzip1q_u32(heads[2], heads[3]));
    uint32x4_t pairs = vreinterpretq_u32_u64(vzip1q_u64(low, high));
    w.scale = vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(pairs)));
    w.least = kind == INT8_Q4_1 ? vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(pairs, 16)))
                                : vmulq_n_f32(w.scale, -8.0f);
    return w;
}

INLINE Four dots(const Weights8 *w, const Inputs *x, const int kind) {
    int8x16_t low = vld1q_s8(x->q), high = vld1q_s8(x->q + 16);
    const int32x4_t start = vreinterpretq_s32_f32((Four){START, 0, 0, 0}); /* its lanes are added up */
    int32x4_t sums[COLS];
    UNROLL for (int c = 0; c < COLS; c++) sums[c] = vdotq_s32(vdotq_s32(start, w->low[c], low), w->high[c], high);
    int32x4_t all = vpaddq_s32(vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3]));
    return vreinterpretq_f32_s32(all) - START;
}

/* The weight rows with four token rows, which are loaded once for all of them. */
INLINE void dots_of_four(const Weights8 *w, const Inputs4 *x, Four *out, const int kind) {
    int32x4_t sums[COLS];
    UNROLL for (int c = 0; c < COLS; c++) sums[c] = vreinterpretq_s32_f32(vdupq_n_f32(START));
#define LANE(part, first, lane)                                                                                        \
    {                                                                                                                  \
        int8x16_t inputs = vld1q_s8(x->q[first + lane][0]);                                                            \
        UNROLL for (int c = 0; c < COLS; c++) sums[c] = vdotq_laneq_s32(sums[c], inputs, part[c], lane);               \
    }
    LANE(w->low, 0, 0) LANE(w->low, 0, 1) LANE(w->low, 0, 2) LANE(w->low, 0, 3)
    LANE(w->high, 4, 0) LANE(w->high, 4, 1) LANE(w->high, 4, 2) LANE(w->high, 4, 3)
#undef LANE
    UNROLL for (int c = 0; c < COLS; c++) out[c] = vreinterpretq_f32_s32(sums[c]) - START;
}

/* One token row with four weight rows, in machine instructions: a compiler copies registers and parts of them to and
 * fro, and the two vector pipes are what limits. Scales and minima of two weight rows share a register (`a`, `c`). */
#define ROW8_OPEN(i, first) "ldr q" #i ", [%[w" #i "], #" first "]\n"
#define ROW8_SPLIT(i, low)                                                                                             \
    "and v" #low ".16b, v" #i ".16b, %[mask].16b\nushr v" #i ".16b, v" #i ".16b, #4\n"
#define ROW8_DOT(sum, numbers, x) "sdot v" #sum ".4s, v" #numbers ".16b, v" #x ".16b\n"
#define ROW8_HEADS                                                                                                     \
    "ldr %w[a], [%[w0]]\nldr %w[b], [%[w1]]\nldr %w[c], [%[w2]]\nldr %w[d], [%[w3]]\n"                                 \
    "orr %[a], %[a], %[b], lsl #32\norr %[c], %[c], %[d], lsl #32\nfmov d16, %[a]\nmov v16.d[1], %[c]\n"
#define ROW8_STARTS "ldr q8, [%[start]]\nldr q9, [%[start]]\nldr q10, [%[start]]\nldr q11, [%[start]]\n"
#define ROW8_COPIES                                                                                                    \
    "mov v8.16b, %[first].16b\nmov v9.16b, %[first].16b\nmov v10.16b, %[first].16b\nmov v11.16b, %[first].16b\n"
#define ROW8_INPUTS "ldp q18, q19, [%[x]]\nldr d20, [%[x], #32]\nadd %[x], %[x], #40\n"
#define ROW8_NEXT(size)                                                                                                \
    "add %[w0], %[w0], #" size "\nadd %[w1], %[w1], #" size "\n"                                                       \
    "add %[w2], %[w2], #" size "\nadd %[w3], %[w3], #" size "\n"
/* The weight rows of the next tile lie in one piece behind these. */
#define ROW8_FETCH(size) "prfm pldl1keep, [%[fetch]]\nadd %[fetch], %[fetch], #4 * " size "\n"
#define ROW8_ADD                                                                                                       \
    "addp v8.4s, v8.4s, v9.4s\naddp v10.4s, v10.4s, v11.4s\naddp v8.4s, v8.4s, v10.4s\n"                               \
    "fsub v8.4s, v8.4s, %[less].4s\nfmla %[sum].4s, v8.4s, v17.4s\n"

#define ROW8_Q4(first, size, least)                                                                                    \
    ROW8_INPUTS ROW8_OPEN(0, first) ROW8_OPEN(1, first) ROW8_OPEN(2, first) ROW8_OPEN(3, first) ROW8_STARTS            \
    ROW8_HEADS ROW8_SPLIT(0, 4) ROW8_SPLIT(1, 5) ROW8_DOT(8, 4, 18) ROW8_DOT(9, 5, 18)                                 \
    ROW8_SPLIT(2, 6) ROW8_SPLIT(3, 7) ROW8_DOT(10, 6, 18) ROW8_DOT(11, 7, 18)                                          \
    "xtn v17.4h, v16.4s\n" ROW8_DOT(8, 0, 19) ROW8_DOT(9, 1, 19)                                                       \
    "fcvtl v17.4s, v17.4h\n" ROW8_DOT(10, 2, 19) ROW8_DOT(11, 3, 19) least ROW8_NEXT(size)                             \
    "fmul v17.4s, v17.4s, v20.s[0]\n" ROW8_ADD "fmla %[sum].4s, v16.4s, v20.s[1]\n" ROW8_FETCH(size)
#define ROW8_Q4_1 ROW8_Q4("4", "20", "shrn v16.4h, v16.4s, #16\nfcvtl v16.4s, v16.4h\n")
#define ROW8_Q4_0 ROW8_Q4("2", "18", "fmul v16.4s, v17.4s, %[minus8].4s\n")
#define ROW8_HIGH(i) "ldr q" #i ", [%[w" #i "], #18]\n"
#define ROW8_Q8_0                                                                                                      \
    ROW8_INPUTS ROW8_OPEN(0, "2") ROW8_OPEN(1, "2") ROW8_OPEN(2, "2") ROW8_OPEN(3, "2") ROW8_COPIES ROW8_HEADS         \
    ROW8_DOT(8, 0, 18) ROW8_DOT(9, 1, 18) ROW8_DOT(10, 2, 18) ROW8_DOT(11, 3, 18)                                      \
    ROW8_HIGH(0) ROW8_HIGH(1) ROW8_HIGH(2) ROW8_HIGH(3)                                                                \
    "xtn v17.4h, v16.4s\n" ROW8_DOT(8, 0, 19) ROW8_DOT(9, 1, 19)                                                       \
    "fcvtl v17.4s, v17.4h\n" ROW8_DOT(10, 2, 19) ROW8_DOT(11, 3, 19) ROW8_NEXT("34")                                   \
    "fmul v17.4s, v17.4s, v20.s[0]\n" ROW8_ADD "prfm pldl1keep, [%[fetch], #64]\n" ROW8_FETCH("34")

#define ROW8_MULTIPLY(block)                                                                                           \
    __asm__ volatile("1:\n" block "subs %[left], %[left], #1\nb.ne 1b\n"                                               \
                     : [w0] "+r"(at[0]), [w1] "+r"(at[1]), [w2] "+r"(at[2]), [w3] "+r"(at[3]), [x] "+r"(x),            \
                       [left] "+r"(blocks), [fetch] "+r"(ahead), [sum] "+w"(sum), [a] "=&r"(heads[0]),                 \
                       [b] "=&r"(heads[1]), [c] "=&r"(heads[2]), [d] "=&r"(heads[3])                                   \
                     : [start] "r"(&start), [first] "w"(start), [less] "w"(vdupq_n_f32(START)),                        \
                       [mask] "w"(vdupq_n_u8(15)), [minus8] "w"(vdupq_n_f32(-8.0f))                                    \
                     : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11",       \
                       "v16", "v17", "v18", "v19", "v20")

/* `at`: the weight rows; `ahead`: the first of the next four, which are fetched meanwhile. */
INLINE Four sum_row(const uint8_t **at, int64_t blocks, const Inputs *x, const uint8_t *ahead, const int kind) {
    const Four start = {START, 0, 0, 0};
    Four sum = {0};
    int64_t heads[4];
    if (kind == INT8_Q4_1) ROW8_MULTIPLY(ROW8_Q4_1);
    if (kind == INT8_Q4_0) ROW8_MULTIPLY(ROW8_Q4_0);
    if (kind == INT8_Q8_0) ROW8_MULTIPLY(ROW8_Q8_0);
    return sum;
}
