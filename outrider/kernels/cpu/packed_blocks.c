/* Packs the blocks of GGUF files, of every kind, into the forms of packed.c.
 *
 * gguf_kinds.py says what the bits of a kind mean, and tests hold this file to it. Codes of a group are read as four words
 * of eight bytes, a code in each, and are written with a few shifts for all eight.
 */
#include "packed.h"

typedef uint64_t Codes[4]; /* 32 codes, in the order of a machine whose first byte is the lowest */

/* What is before a group's codes: scales of a block, and integers of its groups or halves of groups. */
typedef struct {
    float scale, least;
    int8_t inner_scale[2 * GROUPS], inner_least[2 * GROUPS];
} Scales;

#define EACH_BYTE(x) ((x) * 0x0101010101010101u)

INLINE uint64_t word(const uint8_t *at) {
    uint64_t found;
    memcpy(&found, at, sizeof found);
    return found;
}

/* A number in float16. Whole numbers are converted where those of float32 would be denormal: processors may be told to
 * take these for zero. */
INLINE float half_number(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    const uint32_t size = half & 0x7fff, shifted = (size << 13) + ((size >= 0x7c00 ? 224u : 112u) << 23);
    float number = (float)size * 0x1p-24f;
    if (size >= 0x400) memcpy(&number, &shifted, sizeof number);
    return half >> 15 ? -number : number;
}

/* 2^(exponent - 128), of which the two least are denormal. */
INLINE float half_power(uint8_t exponent) {
    const uint32_t bits = exponent < 2 ? 1u << 21 << exponent : (uint32_t)(exponent - 1) << 23;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* ---- codes of group g of a block ---- */

/* Numbers of `bits` bits in 32 bytes, above `shift` lower ones. */
INLINE void read_bits(const uint8_t *at, const int shift, const int bits, Codes codes) {
    for (int i = 0; i < 4; i++) codes[i] = word(at + 8 * i) >> shift & EACH_BYTE((1u << bits) - 1);
}

/* Adds to each code, which has `below` bits, another `bits` bits above them. */
INLINE void add_bits(const uint8_t *at, const int shift, const int bits, const int below, Codes codes) {
    for (int i = 0; i < 4; i++) codes[i] |= (word(at + 8 * i) >> shift & EACH_BYTE((1u << bits) - 1)) << below;
}

/* Four bits in each half of 16 bytes. */
INLINE void read_nibbles(const uint8_t *at, Codes codes) {
    for (int i = 0; i < 4; i++) codes[i] = word(at + i % 2 * 8) >> i / 2 * 4 & EACH_BYTE(15u);
}

/* Adds a fifth bit to each code, from 32 bits in a row. */
INLINE void add_fifth_bits(const uint8_t *at, Codes codes) {
    for (int i = 0; i < 4; i++) {
        const uint64_t each = EACH_BYTE((uint64_t)at[i]) & 0x8040201008040201u; /* bit j in byte j */
        codes[i] |= (each + EACH_BYTE(0x7fu)) >> 7 << 4 & EACH_BYTE(16u);
    }
}

enum { Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS }; /* as in gguf_kinds.py */

INLINE void read_codes(const uint8_t *block, const int g, Codes codes, const int kind) {
    const int half = g / 4, quarter = g % 4;
    switch (kind) {
    case Q8_0: read_bits(block + 2, 0, 8, codes); break;
    case Q4_0:
    case IQ4_NL: read_nibbles(block + 2, codes); break;
    case Q4_1: read_nibbles(block + 4, codes); break;
    case Q5_0: read_nibbles(block + 6, codes), add_fifth_bits(block + 2, codes); break;
    case Q5_1: read_nibbles(block + 8, codes), add_fifth_bits(block + 4, codes); break;
    case MXFP4: read_nibbles(block + 1, codes); break;
    case Q2_K: read_bits(block + 16 + 32 * half, 2 * quarter, 2, codes); break;
    case Q3_K:
        read_bits(block + 32 + 32 * half, 2 * quarter, 2, codes);
        add_bits(block, g, 1, 2, codes);
        break;
    case Q4_K: read_bits(block + 16 + g / 2 * 32, g % 2 * 4, 4, codes); break;
    case Q5_K:
        read_bits(block + 48 + g / 2 * 32, g % 2 * 4, 4, codes);
        add_bits(block + 16, g, 1, 4, codes);
        break;
    case Q6_K:
        read_bits(block + 64 * half + 32 * (quarter % 2), quarter / 2 * 4, 4, codes);
        add_bits(block + 128 + 32 * half, 2 * quarter, 2, 4, codes);
        break;
    case IQ4_XS: read_nibbles(block + 8 + 16 * g, codes); break;
    }
}

/* ---- scales of a block ---- */

/* Eight scales and eight least values of six bits each, in 12 bytes. */
INLINE void read_six_bit_pairs(const uint8_t *at, Scales *s) {
    for (int i = 0; i < 4; i++) {
        s->inner_scale[i] = at[i] & 63, s->inner_scale[4 + i] = (at[8 + i] & 15) | at[i] >> 6 << 4;
        s->inner_least[i] = at[4 + i] & 63, s->inner_least[4 + i] = at[8 + i] >> 4 | at[4 + i] >> 6 << 4;
    }
}

INLINE void read_scales(const uint8_t *block, Scales *s, const int kind) {
    s->scale = kind == MXFP4 ? half_power(block[0]) : 0;
    switch (kind) {
    case Q4_1:
    case Q5_1: s->least = half_number(block + 2); /* fall through */
    case Q8_0:
    case Q4_0:
    case Q5_0:
    case IQ4_NL: s->scale = half_number(block); break;
    case Q2_K:
        s->scale = half_number(block + 80), s->least = -half_number(block + 82);
        for (int i = 0; i < 16; i++) s->inner_scale[i] = block[i] & 15, s->inner_least[i] = block[i] >> 4;
        break;
    case Q3_K:
        s->scale = half_number(block + 108);
        for (int i = 0; i < 16; i++) {
            const int low = block[96 + i % 8] >> i / 8 * 4 & 15, high = block[104 + i % 4] >> i / 4 * 2 & 3;
            s->inner_scale[i] = (int8_t)((low | high << 4) - 32);
        }
        break;
    case Q4_K:
    case Q5_K:
        s->scale = half_number(block), s->least = -half_number(block + 2);
        read_six_bit_pairs(block + 4, s);
        break;
    case Q6_K:
        s->scale = half_number(block + 208);
        memcpy(s->inner_scale, block + 192, 16);
        break;
    case IQ4_XS:
        s->scale = half_number(block);
        for (int i = 0; i < 8; i++) {
            const int low = block[4 + i / 2] >> i % 2 * 4 & 15, high = block[2 + i / 4] >> i % 4 * 2 & 3;
            s->inner_scale[i] = (int8_t)((low | high << 4) - 32);
        }
        break;
    }
}

/* ---- places in a unit ---- */

/* Eight bytes that belong into two registers. */
INLINE void write_word(uint8_t *at, uint64_t bytes) {
    memcpy(at, &bytes, 4);
    bytes >>= 32;
    memcpy(at + REGISTER, &bytes, 4);
}

/* The codes of one weight row's group, into the registers that begin at its first byte in the first of them. */
INLINE void write_codes(uint8_t *at, const Codes codes, const Form f) {
    const int has_nibbles = f.bits >= 4 && f.bits < 8, has_twos = f.bits == 2 || f.bits == 3 || f.bits == 6;
    const uint64_t fours = EACH_BYTE(15u), twos = EACH_BYTE(3u), ones = EACH_BYTE(1u);
    if (f.bits == 8)
        for (int i = 0; i < 4; i++) write_word(at + 2 * i * REGISTER, codes[i]);
    if (has_nibbles) {
        for (int i = 0; i < 2; i++) write_word(at + 2 * i * REGISTER, (codes[i] & fours) | (codes[2 + i] & fours) << 4);
        at += 4 * REGISTER;
    }
    if (has_twos) {
        uint64_t all = 0;
        for (int i = 0; i < 4; i++) all |= (codes[i] >> (has_nibbles ? 4 : 0) & twos) << 2 * i;
        write_word(at, all);
        at += 2 * REGISTER;
    }
    if (f.bits & 1) {
        uint64_t all = 0;
        for (int i = 0; i < 4; i++) all |= (codes[i] >> (f.bits - 1) & ones) << 2 * i;
        const uint32_t bits = (uint32_t)(all | all >> 31); /* even registers, and odd ones */
        memcpy(at, &bits, 4);
    }
}

/* One block of one weight row as a lane of a unit. */
INLINE void pack_block(const uint8_t *block, uint8_t *unit, int lane, const int kind, const Form f) {
    Scales s;
    read_scales(block, &s, kind);
    memcpy(unit + 4 * lane, &s.scale, 4);
    if (f.has_least) memcpy(unit + 4 * (VL + lane), &s.least, 4);
    for (int g = 0; g < unit_groups(f); g++) {
        uint8_t *at = unit + (f.is_nested ? head_bytes(f) : 0) + g * group_bytes(f);
        for (int h = 0; f.is_nested && h < f.halves; h++) {
            at[h * VL + lane] = (uint8_t)s.inner_scale[g * f.halves + h];
            if (f.has_least) at[(f.halves + h) * VL + lane] = (uint8_t)s.inner_least[g * f.halves + h];
        }
        Codes codes;
        read_codes(block, g, codes, kind);
        write_codes(at + group_bytes(f) - f.bits * REGISTER + 4 * lane, codes, f);
    }
}

typedef void Pack(const uint8_t *, uint8_t *, int);
#define EACH_KIND(use)                                                                                                 \
    use(Q8_0, PACKED_8, 34) use(Q4_0, PACKED_4, 18) use(Q4_1, PACKED_4_LEAST, 20) use(Q5_0, PACKED_5, 22)              \
    use(Q5_1, PACKED_5_LEAST, 24) use(IQ4_NL, PACKED_TABLE, 18) use(MXFP4, PACKED_TABLE, 17)                           \
    use(Q2_K, NESTED_2_LEAST_HALVES, 84) use(Q3_K, NESTED_3_HALVES, 110) use(Q4_K, NESTED_4_LEAST, 144)                \
    use(Q5_K, NESTED_5_LEAST, 176) use(Q6_K, NESTED_6_HALVES, 210) use(IQ4_XS, NESTED_TABLE, 136)
#define PACK(kind, form, bytes)                                                                                        \
    static void pack_##kind(const uint8_t *block, uint8_t *unit, int lane) {                                           \
        pack_block(block, unit, lane, kind, FORMS[form]);                                                              \
    }
#define DESCRIBED(kind, form, bytes) [kind] = {pack_##kind, form, bytes},
EACH_KIND(PACK)
static const struct {
    Pack *pack;
    int form, bytes; /* bytes: of a block */
} KINDS[] = {EACH_KIND(DESCRIBED)};

/* Weight rows of a file, each of `units` blocks of one kind and `row_bytes` from the next. Lanes without a row are zeros. */
void pack_blocks(const uint8_t *blocks, int64_t row_bytes, int64_t rows, int64_t units, int64_t kind, uint8_t *out) {
    const int64_t size = unit_bytes(FORMS[KINDS[kind].form]);
    for (int64_t first = 0; first < rows; first += VL)
        for (int64_t u = 0; u < units; u++, out += size) {
            const int64_t count = rows - first < VL ? rows - first : VL;
            const uint8_t *block = blocks + first * row_bytes + u * KINDS[kind].bytes;
            if (count < VL) memset(out, 0, size);
            for (int lane = 0; lane < count; lane++) KINDS[kind].pack(block + lane * row_bytes, out, lane);
        }
}
