/* Blocks of GGUF weights in NEON registers: unpacked, and multiplied with up to eight token rows.
 *
 * A Neoverse N1 turns integers into floats at a quarter of the rate of other vector instructions, and gcc takes the
 * conversion of bytes apart into scalar loads. So the bytes of the floats are put together by table look-ups:
 *   Q4_1, Q4_0  the third and the fourth byte of 0 to 15, or of -8 to 7; the other two are zero
 *   Q8_0        the number plus 128 as the second byte, and a fourth one that makes it 2^15 + 128 + number
 * Then the scale is multiplied and `least` is added by one fused operation. Only the sum of Q4_1 is ever rounded.
 */
#pragma once
#include "native.h"

/* What a kind's code reads: bytes of floats by number, then, for four vectors, the bytes that a look-up takes from two
 * tables of 16; 255 stands for none, which gives zero. */
typedef struct {
    uint8_t third[16], fourth[16], take[4][16];
    float offset[4]; /* from a float to the number that it stands for */
} FloatBytes;

#define OFFSET (0x1p15f + 128.0f)
#define TAKE_Q4(i) {255, 255, i, 16 + i, 255, 255, i + 1, 17 + i, 255, 255, i + 2, 18 + i, 255, 255, i + 3, 19 + i}
#define TAKE_Q8(i) {255, i, 255, 16, 255, i + 1, 255, 16, 255, i + 2, 255, 16, 255, i + 3, 255, 16}

static const FloatBytes Q4_1_BYTES = {
    {0, 0x80, 0, 0x40, 0x80, 0xa0, 0xc0, 0xe0, 0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70},
    {0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41},
    {TAKE_Q4(0), TAKE_Q4(4), TAKE_Q4(8), TAKE_Q4(12)},
};
static const FloatBytes Q4_0_BYTES = {
    {0, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0, 0x80, 0, 0x80, 0, 0x40, 0x80, 0xa0, 0xc0, 0xe0},
    {0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf, 0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40},
    {TAKE_Q4(0), TAKE_Q4(4), TAKE_Q4(8), TAKE_Q4(12)},
};
static const FloatBytes Q8_0_BYTES = {
    {0}, {0}, {TAKE_Q8(0), TAKE_Q8(4), TAKE_Q8(8), TAKE_Q8(12)}, {-OFFSET, -OFFSET, -OFFSET, -OFFSET},
};

INLINE const FloatBytes *float_bytes(const int kind) {
    return kind == Q8_0 ? &Q8_0_BYTES : kind == Q4_0 ? &Q4_0_BYTES : &Q4_1_BYTES;
}

/* A block as eight vectors. */
INLINE void unpack_neon(const uint8_t *block, vf *w, const int kind) {
    uint32_t pair; /* two float16: the scale and, in Q4_1, the minimum */
    memcpy(&pair, block, 4);
    float32x4_t numbers = vcvt_f32_f16(vreinterpret_f16_u32(vdup_n_u32(pair)));
    float32x4_t least = kind == Q4_1 ? vdupq_laneq_f32(numbers, 1) : vmulq_laneq_f32(vdupq_n_f32(-OFFSET), numbers, 0);
    uint8x16_t packed = vld1q_u8(block + (kind == Q4_1 ? 4 : 2));
    UNROLL for (int half = 0; half < 2; half++) {
        uint8x16_t numerals = kind == Q8_0 ? veorq_u8(vld1q_u8(block + 2 + half * 16), vdupq_n_u8(128))
                              : half       ? vshrq_n_u8(packed, 4)
                                           : vandq_u8(packed, vdupq_n_u8(15));
        const FloatBytes *bytes = float_bytes(kind);
        uint8x16x2_t tables = {{numerals, vdupq_n_u8(0x47)}};
        if (kind != Q8_0)
            tables = (uint8x16x2_t){{vqtbl1q_u8(vld1q_u8(bytes->third), numerals),
                                     vqtbl1q_u8(vld1q_u8(bytes->fourth), numerals)}};
        UNROLL for (int v = 0; v < 4; v++) {
            float32x4_t q = vreinterpretq_f32_u8(vqtbl2q_u8(tables, vld1q_u8(bytes->take[v])));
            w[half * 4 + v] = (vf)(kind == Q4_0 ? vmulq_laneq_f32(q, numbers, 0)
                                                : vfmaq_laneq_f32(least, q, numbers, 0));
        }
    }
}

/* The products of a row of blocks are written as machine instructions: gcc 12 copies tables between registers and
 * spills sums, which takes twice the time. Four weights are unpacked while the four before them are multiplied, because
 * instructions that wait for others fill the queues of the processor. Registers:
 *   v0 to v7, v8 to v15    sums of a first and a second weight row with up to eight token rows
 *   v16 and v17, or v18 and v19    four weights of each: being multiplied, or being unpacked
 *   v20 and v21, v22 and v23       two tables of bytes of each
 *   v24, v25               the scales
 *   v26 to v29             vectors of token rows
 *   v30, v31               for passing use
 * `least` lies in memory: it is needed as a fresh copy for every vector, and a load is cheaper than a move. */
#define LOAD_1(v, n, r, a) "ldr q" #a ", [%[x], #16 * (" #v " * " #n " + " #r ")]\n"
#define LOAD_2(v, n, r, a, b) "ldp q" #a ", q" #b ", [%[x], #16 * (" #v " * " #n " + " #r ")]\n"
#define ADD(first, second, a, r, s)                                                                                    \
    "fmla v" #r ".4s, v" #a ".4s, v" #first ".4s\nfmla v" #s ".4s, v" #a ".4s, v" #second ".4s\n"

#define HEAD_1(v, n) LOAD_1(v, n, 0, 26)
#define HEAD_2(v, n) LOAD_2(v, n, 0, 26, 27)
#define HEAD_3(v, n) LOAD_2(v, n, 0, 26, 27) LOAD_1(v, n, 2, 28)
#define HEAD_4(v, n) LOAD_2(v, n, 0, 26, 27) LOAD_2(v, n, 2, 28, 29)
#define HEAD_5(v, n) HEAD_4(v, n)
#define HEAD_6(v, n) HEAD_4(v, n)
#define HEAD_7(v, n) HEAD_4(v, n)
#define HEAD_8(v, n) HEAD_4(v, n)

#define ADDS_1(v, n, f, s) ADD(f, s, 26, 0, 8)
#define ADDS_2(v, n, f, s) ADD(f, s, 26, 0, 8) ADD(f, s, 27, 1, 9)
#define ADDS_3(v, n, f, s) ADDS_2(v, n, f, s) ADD(f, s, 28, 2, 10)
#define ADDS_4(v, n, f, s) ADDS_3(v, n, f, s) ADD(f, s, 29, 3, 11)
#define ADDS_5(v, n, f, s)                                                                                             \
    ADDS_2(v, n, f, s) LOAD_1(v, n, 4, 26) ADD(f, s, 28, 2, 10) ADD(f, s, 29, 3, 11) ADD(f, s, 26, 4, 12)
#define ADDS_6(v, n, f, s)                                                                                             \
    ADDS_2(v, n, f, s) LOAD_2(v, n, 4, 26, 27) ADD(f, s, 28, 2, 10) ADD(f, s, 29, 3, 11)                               \
    ADD(f, s, 26, 4, 12) ADD(f, s, 27, 5, 13)
#define ADDS_7(v, n, f, s)                                                                                             \
    ADDS_2(v, n, f, s) LOAD_2(v, n, 4, 26, 27) ADD(f, s, 28, 2, 10) ADD(f, s, 29, 3, 11) LOAD_1(v, n, 6, 28)           \
    ADD(f, s, 26, 4, 12) ADD(f, s, 27, 5, 13) ADD(f, s, 28, 6, 14)
#define ADDS_8(v, n, f, s)                                                                                             \
    ADDS_2(v, n, f, s) LOAD_2(v, n, 4, 26, 27) ADD(f, s, 28, 2, 10) ADD(f, s, 29, 3, 11) LOAD_2(v, n, 6, 28, 29)       \
    ADD(f, s, 26, 4, 12) ADD(f, s, 27, 5, 13) ADD(f, s, 28, 6, 14) ADD(f, s, 29, 7, 15)

#define UNPACK(take, f, s, scaled)                                                                                     \
    "ldr q30, [%[bytes], #32 + 16 * " #take "]\n"                                                                      \
    "tbl v31.16b, {v22.16b, v23.16b}, v30.16b\ntbl v30.16b, {v20.16b, v21.16b}, v30.16b\n" scaled(f, s)
#define SCALED(f, s) "fmul v" #f ".4s, v30.4s, v24.s[0]\nfmul v" #s ".4s, v31.4s, v25.s[0]\n"
#define SCALED_AND_ADDED(f, s)                                                                                         \
    "ldp q" #f ", q" #s ", [%[least]]\n"                                                                               \
    "fmla v" #f ".4s, v30.4s, v24.s[0]\nfmla v" #s ".4s, v31.4s, v25.s[0]\n"

#define OPEN_Q4_0 "ldr s24, [%[w]]\nldr s25, [%[second]]\nfcvtl v24.4s, v24.4h\nfcvtl v25.4s, v25.4h\n"
#define OPEN_Q4_1 OPEN_Q4_0 "dup v30.4s, v24.s[1]\ndup v31.4s, v25.s[1]\nstp q30, q31, [%[least]]\n"
#define OPEN_Q8_0                                                                                                      \
    "ldr h24, [%[w]]\nldr h25, [%[second]]\nldr q16, [%[bytes], #96]\nfcvt s24, h24\nfcvt s25, h25\n"                  \
    "fmul v30.4s, v16.4s, v24.s[0]\nfmul v31.4s, v16.4s, v25.s[0]\nstp q30, q31, [%[least]]\n"

#define NIBBLES(at) "ldr q30, [%[w], #" #at "]\nldr q31, [%[second], #" #at "]\nldp q16, q17, [%[bytes]]\n"
#define TABLES_Q4                                                                                                      \
    "tbl v20.16b, {v16.16b}, v30.16b\ntbl v21.16b, {v17.16b}, v30.16b\n"                                               \
    "tbl v22.16b, {v16.16b}, v31.16b\ntbl v23.16b, {v17.16b}, v31.16b\n"
#define LOW(at)                                                                                                        \
    NIBBLES(at) "movi v20.16b, #15\nand v30.16b, v30.16b, v20.16b\nand v31.16b, v31.16b, v20.16b\n" TABLES_Q4
#define HIGH(at) NIBBLES(at) "ushr v30.16b, v30.16b, #4\nushr v31.16b, v31.16b, #4\n" TABLES_Q4
#define NUMBERS(at)                                                                                                    \
    "ldr q20, [%[w], #" #at "]\nldr q22, [%[second], #" #at "]\nmovi v30.16b, #128\n"                                  \
    "eor v20.16b, v20.16b, v30.16b\neor v22.16b, v22.16b, v30.16b\n"
#define LOW_Q4_0 LOW(2)
#define HIGH_Q4_0 HIGH(2)
#define SCALED_Q4_0 SCALED
#define LOW_Q4_1 LOW(4)
#define HIGH_Q4_1 HIGH(4)
#define SCALED_Q4_1 SCALED_AND_ADDED
#define LOW_Q8_0 NUMBERS(2)
#define HIGH_Q8_0 NUMBERS(18)
#define SCALED_Q8_0 SCALED_AND_ADDED

#define TO_FIRST(v, n, take, scaled) HEAD_##n(v, n) UNPACK(take, 16, 17, scaled) ADDS_##n(v, n, 18, 19)
#define TO_SECOND(v, n, take, scaled) HEAD_##n(v, n) UNPACK(take, 18, 19, scaled) ADDS_##n(v, n, 16, 17)

#define EACH_SUM(pair)                                                                                                 \
    pair(0, 1, 0) pair(2, 3, 32) pair(4, 5, 64) pair(6, 7, 96)                                                         \
    pair(8, 9, 128) pair(10, 11, 160) pair(12, 13, 192) pair(14, 15, 224)
#define CLEAR(a, b, at) "movi v" #a ".4s, #0\nmovi v" #b ".4s, #0\n"
#define SAVE(a, b, at) "stp q" #a ", q" #b ", [%[sums], #" #at "]\n"

/* The last block is opened once more in place of one behind the end. */
#define MULTIPLY(n, kind)                                                                                              \
    __asm__ volatile(EACH_SUM(CLEAR) "movi v21.16b, #0x47\nmovi v23.16b, #0x47\n"                                      \
                     OPEN_##kind LOW_##kind UNPACK(0, 16, 17, SCALED_##kind)                                           \
                     "1:\nprfm pldl1keep, [%[w], %[ahead]]\nprfm pldl1keep, [%[second], %[ahead]]\n"                   \
                     TO_SECOND(0, n, 1, SCALED_##kind) TO_FIRST(1, n, 2, SCALED_##kind)                                \
                     TO_SECOND(2, n, 3, SCALED_##kind) HIGH_##kind TO_FIRST(3, n, 0, SCALED_##kind)                    \
                     TO_SECOND(4, n, 1, SCALED_##kind) TO_FIRST(5, n, 2, SCALED_##kind)                                \
                     TO_SECOND(6, n, 3, SCALED_##kind)                                                                 \
                     "subs %[blocks], %[blocks], #1\ncsel %[size], %[size], xzr, ne\n"                                 \
                     "add %[w], %[w], %[size]\nadd %[second], %[second], %[size]\n"                                    \
                     OPEN_##kind LOW_##kind TO_FIRST(7, n, 0, SCALED_##kind)                                           \
                     "add %[x], %[x], #128 * " #n "\ncbnz %[blocks], 1b\n" EACH_SUM(SAVE)                              \
                     : [w] "+r"(w), [second] "+r"(second), [x] "+r"(x), [blocks] "+r"(blocks), [size] "+r"(size)       \
                     : [bytes] "r"(&kind##_BYTES), [least] "r"(least), [ahead] "r"(ahead), [sums] "r"(sums)            \
                     : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11",       \
                       "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24",      \
                       "v25", "v26", "v27", "v28", "v29", "v30", "v31")
#define MULTIPLY_KIND(n)                                                                                               \
    case n:                                                                                                            \
        if (kind == Q4_1) MULTIPLY(n, Q4_1);                                                                           \
        if (kind == Q4_0) MULTIPLY(n, Q4_0);                                                                           \
        if (kind == Q8_0) MULTIPLY(n, Q8_0);                                                                           \
        break;

/* Sums of products of two weight rows with `rows` packed token rows, in the order of `product_tile`: the first eight
 * vectors belong to the first weight row. `ahead`: bytes to what is fetched meanwhile. */
INLINE void multiply_blocks(const uint8_t *w, const uint8_t *second, int64_t blocks, int64_t size, int64_t ahead,
                            const float *x, vf *sums, const int rows, const int kind) {
    float least[8];
    switch (rows) {
        MULTIPLY_KIND(1) MULTIPLY_KIND(2) MULTIPLY_KIND(3) MULTIPLY_KIND(4)
        MULTIPLY_KIND(5) MULTIPLY_KIND(6) MULTIPLY_KIND(7) MULTIPLY_KIND(8)
    }
}
