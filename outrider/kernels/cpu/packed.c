/* Products with weights that were repacked from a file's blocks into one common form, whatever their kind there.
 *
 * A weight is scale * (code - offset) + least. Codes have 2 to 8 bits. Every 32 inputs of a weight row are a group. Either
 * each group has a scale (and a least value) in float32, or 256 inputs share one, which is multiplied with an integer of
 * 8 bits for every 32 or 16 inputs. VL weight rows are interleaved: a register holds codes of four inputs of each of
 * them and meets the same four inputs of a token row, so a lane is a weight row and nothing is added across lanes.
 *
 * Token rows are rounded to integers, a scale for every 32 inputs: x = scale * (q0 + q1 / 254 + q2 / 254^2), each q within
 * -127 and 127. With one such digit that is a rounding to 8 bits, with two to 16; with three the error is 2^-24 of the
 * largest input, as in float32. Sums of a group are integers, hence exact; groups are added up in float32, from first to
 * last. So a token row has the same bits alone and among others.
 */
#include "packed.h"
#include <float.h>

#define MAX_DIGITS 3
#define BASE 254.0f        /* from a digit to the next one */
#define START 0x1.8p23f    /* its bits with a sum added, read as a float, are 3 * 2^22 plus the sum: no conversion */
#define START_BITS 0x4b400000
#define PIECE (VL > 8 ? 32 : 16) /* weight rows that a thread takes at once: whole pairs of VL on every machine */

#if defined(__AVX512VNNI__) && VL == 16
#define RAISED 128 /* added to signed codes: these dot products take them without a sign */
#else
#define RAISED 0
#endif

typedef uint8_t Bytes __attribute__((vector_size(REGISTER), aligned(1), may_alias));
typedef int8_t Small __attribute__((vector_size(VL), aligned(1), may_alias));

/* 32 inputs of a token row, without those of the sums that are of other digits than there are: they are followed by the
 * digits, int8_t [digits][32]. */
typedef struct {
    float scale, total[2];       /* total: the sum of what the digits of each half stand for */
    int16_t sums[MAX_DIGITS][2]; /* of the digits of each half */
    int16_t unused[4];
} Inputs;

/* The same group of VL weight rows. */
typedef struct {
    Bytes codes[8];
    vf scale[2], least[2];
} Group;

#define PAIR 2 /* runs of VL weight rows that meet the same inputs, so that these are loaded once for both */

typedef struct {
    const PackedPart *part;
    const uint8_t *x; /* Inputs with their digits [groups][tokens] */
    const float *bias;
    float *y;
    int64_t groups, tokens, outputs; /* outputs: of the whole weight */
    int64_t end;                     /* lanes that begin here or later belong to another piece */
    int64_t first;                   /* the first of a few token rows that are multiplied together */
} Product;

INLINE int64_t digits_at(int digits) { return digits == 1 ? 16 : sizeof(Inputs); }
INLINE int64_t inputs_bytes(int digits) { return digits_at(digits) + digits * INPUTS; }

int64_t packed_lanes(void) { return VL; }
int64_t packed_unit_bytes(int64_t form) { return unit_bytes(FORMS[form]); }

/* ---- registers ---- */

#if defined(__ARM_FEATURE_DOTPROD)
/* Adds the products of four registers, from register `r` on, with the digits of 16 inputs; of one group or of two. */
INLINE void dot16(vi (*sums)[PAIR], const Group *g, const int r, const int8_t *x, const int is_signed, const int groups,
                  const int digits) {
    (void)is_signed;
    UNROLL for (int d = 0; d < digits; d++) {
        const int8x16_t inputs = vld1q_s8(x + d * INPUTS);
        UNROLL for (int l = 0; l < groups; l++) {
            const Bytes *codes = g[l].codes + r;
            int32x4_t out = (int32x4_t)sums[d][l];
            out = vdotq_laneq_s32(out, (int8x16_t)codes[0], inputs, 0);
            out = vdotq_laneq_s32(out, (int8x16_t)codes[1], inputs, 1);
            out = vdotq_laneq_s32(out, (int8x16_t)codes[2], inputs, 2);
            sums[d][l] = (vi)vdotq_laneq_s32(out, (int8x16_t)codes[3], inputs, 3);
        }
    }
}
#elif RAISED || defined(__AVX512BW__) || (defined(__AVX2__) && VL == 8)
/* sums plus products of one register with the same four inputs in all lanes. Codes are within 0 and 127 unless they
 * are signed, and digits within -127 and 127, so that sums of two products never exceed 16 bits. */
INLINE vi dot4(vi sums, Bytes codes, int32_t four, const int is_signed) {
    (void)is_signed; /* most machines multiply both kinds of codes alike */
#if RAISED
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVX512BW__)
    __m512i a = (__m512i)codes, b = _mm512_set1_epi32(four);
    if (is_signed) {
        b = _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b);
        a = _mm512_abs_epi8(a);
    }
    return sums + (vi)_mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1));
#else
    __m256i a = (__m256i)codes, b = _mm256_set1_epi32(four);
    if (is_signed) b = _mm256_sign_epi8(b, a), a = _mm256_abs_epi8(a);
    return sums + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
#endif
}

/* Both groups meet four inputs before the next four are loaded: loads of a vector of the same four inputs are what
 * takes the time, and a compiler keeps more of them than there are registers otherwise. All digits of four inputs come
 * one after the other, since a sum waits five cycles for the one before. */
INLINE void dot16(vi (*sums)[PAIR], const Group *g, const int r, const int8_t *x, const int is_signed, const int groups,
                  const int digits) {
    UNROLL for (int i = 0; i < 4; i++)
        UNROLL for (int d = 0; d < digits; d++) {
            int32_t four;
            memcpy(&four, x + d * INPUTS + 4 * i, 4);
            UNROLL for (int l = 0; l < groups; l++) sums[d][l] = dot4(sums[d][l], g[l].codes[r + i], four, is_signed);
        }
}
#else
/* Not inlined: in every product it would take a compiler minutes. */
static __attribute__((noinline)) void dot16(vi (*sums)[PAIR], const Group *g, const int r, const int8_t *x,
                                            const int is_signed, const int groups, const int digits) {
    (void)is_signed;
    for (int at = 0; at < digits * groups; at++) {
        const int d = at / groups, l = at % groups;
        const int8_t *w = (const int8_t *)(g[l].codes + r), *inputs = x + d * INPUTS;
        int32_t lanes[VL];
        memcpy(lanes, sums[d] + l, sizeof lanes);
        for (int i = 0; i < 4; i++)
            for (int lane = 0; lane < VL; lane++)
                for (int j = 0; j < 4; j++) lanes[lane] += w[i * REGISTER + 4 * lane + j] * inputs[4 * i + j];
        memcpy(sums[d] + l, lanes, sizeof lanes);
    }
}
#endif

/* The entries of a table of 16 bytes. */
#if defined(__aarch64__) || defined(__AVX512BW__) || (defined(__AVX2__) && VL == 8)
INLINE Bytes look_up(const int8_t *table, Bytes at) {
#if defined(__aarch64__)
    return (Bytes)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)at);
#elif defined(__AVX512BW__)
    __m128i entries = _mm_loadu_si128((const __m128i *)table);
    return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), (__m512i)at);
#else
    __m128i entries = _mm_loadu_si128((const __m128i *)table);
    return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), (__m256i)at);
#endif
}
#else
static __attribute__((noinline)) Bytes look_up(const int8_t *table, Bytes at) {
    uint8_t bytes[REGISTER];
    memcpy(bytes, &at, sizeof bytes);
    for (int i = 0; i < REGISTER; i++) bytes[i] = (uint8_t)table[bytes[i]];
    memcpy(&at, bytes, sizeof bytes);
    return at;
}
#endif

/* Runs of VL signed bytes as floats, run by run. */
INLINE void small_numbers(const uint8_t *at, vf *out, const int runs) {
#if defined(__aarch64__)
    UNROLL for (int r = 0; r < runs; r += 2) { /* two runs at a time: half as many instructions */
        uint64_t eight = 0;
        memcpy(&eight, at + r * VL, runs - r < 2 ? 4 : 8);
        const int16x8_t wide = vmovl_s8(vcreate_s8(eight));
        out[r] = (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
        if (runs - r >= 2) out[r + 1] = (vf)vcvtq_f32_s32(vmovl_high_s16(wide));
    }
#else
    UNROLL for (int r = 0; r < runs; r++) {
        const vi wide = __builtin_convertvector(*(const Small *)(at + r * VL), vi);
        out[r] = (vf)(wide + (vi)splat(START)) - START;
    }
#endif
}

/* Bytes shifted to the right, or to the left by a negative number. */
INLINE Bytes shift_bits(const uint8_t *at, const int shift) {
    const Bytes bytes = *(const Bytes *)at;
    return shift < 0 ? (Bytes)(bytes << -shift) : (Bytes)(bytes >> shift);
}

/* The bits of a mask from shifted bytes, the others from `code`, where the mask's are zero. */
INLINE Bytes insert_bits(Bytes code, const uint8_t *at, const int shift, const int mask) {
    const Bytes shifted = shift_bits(at, shift);
#if defined(__aarch64__)
    return (Bytes)vbslq_u8(vdupq_n_u8((uint8_t)mask), (uint8x16_t)shifted, (uint8x16_t)code);
#else
    return code | (shift >= 0 && mask == 255 >> shift ? shifted : (Bytes)(shifted & (uint8_t)mask));
#endif
}

INLINE void open_codes(const uint8_t *at, const int8_t *table, Bytes *codes, const Form f) {
    const int has_nibbles = f.bits >= 4 && f.bits < 8, has_twos = f.bits == 2 || f.bits == 3 || f.bits == 6;
    const int below_twos = has_nibbles ? 4 : 0, below_ones = f.bits - 1;
    const uint8_t *twos = at + below_twos * REGISTER, *ones = twos + (has_twos ? 2 * REGISTER : 0);
    UNROLL for (int r = 0; r < 8; r++) {
        Bytes code = {0};
        if (f.bits == 8) code = *(const Bytes *)(at + r * REGISTER);
        if (has_nibbles) code = shift_bits(at + r % 4 * REGISTER, r / 4 * 4);
        if (has_nibbles && r < 4) code &= 15;
        if (has_nibbles && f.is_signed) code = look_up(table, code);
        if (has_twos) code = insert_bits(code, twos + r % 2 * REGISTER, r / 2 * 2 - below_twos, 3 << below_twos);
        if (f.bits & 1) code = insert_bits(code, ones, r - below_ones, 1 << below_ones);
        if (f.is_signed && RAISED) code ^= 128;
        codes[r] = code;
    }
}

/* `head`: the scales in float32, which a nested form has before its first group. */
INLINE void open_group(const uint8_t *head, const uint8_t *at, const int8_t *table, Group *g, const Form f) {
    const vf scale = load((const float *)head), least = f.has_least ? load((const float *)head + VL) : (vf){0};
    vf small[4];
    if (f.is_nested) small_numbers(at, small, (1 + f.has_least) * f.halves);
    UNROLL for (int h = 0; h < f.halves; h++) {
        g->scale[h] = f.is_nested ? scale * small[h] : scale;
        if (f.has_least) g->least[h] = f.is_nested ? least * small[f.halves + h] : least;
    }
    open_codes(at + group_bytes(f) - f.bits * REGISTER, table, g->codes, f);
}

/* Adds the products of a group with a token row, or of the same group of two runs of weight rows. */
INLINE void add_groups(vf *sums, const Group *g, const uint8_t *x, const int digits, const Form f, const int groups) {
    const Inputs *in = (const Inputs *)x;
    const int8_t *q = (const int8_t *)x + digits_at(digits);
    UNROLL for (int h = 0; h < f.halves; h++) {
        const int lowered = f.offset + (f.is_signed ? RAISED : 0);
        vi dots[MAX_DIGITS][PAIR];
        UNROLL for (int d = 0; d < digits; d++) {
            vi start = (vi)splat(START);
            if (lowered) start = (vi){0} + (START_BITS - lowered * (in->sums[d][h] + (f.halves == 1 ? in->sums[d][1] : 0)));
            UNROLL for (int l = 0; l < groups; l++) dots[d][l] = start;
        }
        dot16(dots, g, 4 * h, q + 16 * h, f.is_signed, groups, digits);
        if (f.halves == 1) dot16(dots, g, 4, q + 16, f.is_signed, groups, digits);
        UNROLL for (int l = 0; l < groups; l++) {
            vf found = (vf)dots[digits - 1][l] - START;
            UNROLL for (int d = digits - 2; d >= 0; d--)
                found = fused(found, splat(1.0f / BASE), (vf)dots[d][l] - START);
            sums[l] = fused(found, g[l].scale[h] * in->scale, sums[l]);
            if (f.has_least)
                sums[l] = fused(g[l].least[h], splat(in->total[h] + (f.halves == 1 ? in->total[1] : 0.0f)), sums[l]);
        }
    }
}

/* ---- token rows ---- */

#define RUNS (INPUTS / VL) /* vectors of a group's inputs */

/* Compilers take the lanes of a vector out one by one. */
INLINE int32_t max_integer(vi v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(__aarch64__)
    return vmaxvq_s32((int32x4_t)v);
#else
    int32_t most = v[0];
    UNROLL for (int i = 1; i < VL; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

/* Writes the digits of 32 inputs as bytes, and the sum of each half. */
INLINE void store_digits(const vi *digits, int8_t *q, int16_t *sums) {
#if defined(__AVX512BW__)
    const __m128i low = _mm512_cvtepi32_epi8((__m512i)digits[0]), high = _mm512_cvtepi32_epi8((__m512i)digits[1]);
    const __m256i both = _mm256_set_m128i(high, low);
    _mm256_storeu_si256((__m256i *)q, both);
    const __m256i twos = _mm256_maddubs_epi16(_mm256_set1_epi8(1), both), zero = _mm256_setzero_si256();
    const __m256i fours = _mm256_madd_epi16(twos, _mm256_set1_epi16(1));
    const __m256i totals = _mm256_hadd_epi32(_mm256_hadd_epi32(fours, zero), zero);
    sums[0] = (int16_t)_mm_cvtsi128_si32(_mm256_castsi256_si128(totals));
    sums[1] = (int16_t)_mm_cvtsi128_si32(_mm256_extracti128_si256(totals, 1));
#else
    int32_t lanes[INPUTS];
    UNROLL for (int r = 0; r < RUNS; r++) memcpy(lanes + r * VL, digits + r, sizeof(vi));
    for (int h = 0; h < 2; h++) {
        int32_t sum = 0;
        for (int i = 16 * h; i < 16 * h + 16; i++) q[i] = (int8_t)lanes[i], sum += q[i];
        sums[h] = (int16_t)sum;
    }
#endif
}

/* The scale is NaN where an input is NaN: as integers, sizes of numbers are in the order of the numbers, and NaN is the
 * largest. Where no float32 number is 127 / largest, the inputs count for zero. */
static void round_inputs(const float *x, uint8_t *to, int digits) {
    const vf bias = splat(START);
    Inputs *out = (Inputs *)to;
    int8_t *q = (int8_t *)to + digits_at(digits);
    vi sizes = {0};
    UNROLL for (int r = 0; r < RUNS; r++) {
        vi size = (vi)load(x + r * VL) & 0x7fffffff, is_larger = size > sizes;
        sizes = (is_larger & size) | (~is_larger & sizes);
    }
    const int32_t most = max_integer(sizes);
    float largest, total[2] = {0};
    memcpy(&largest, &most, sizeof largest);
    float inverse = 127.0f / largest;
    if (!(inverse <= FLT_MAX)) inverse = 0.0f;
    vf rest[RUNS];
    UNROLL for (int r = 0; r < RUNS; r++) rest[r] = load(x + r * VL) * inverse;
    for (int d = 0; d < digits; d++) {
        vi whole[RUNS];
        UNROLL for (int r = 0; r < RUNS; r++) {
            vf shifted = rest[r] + bias;
            whole[r] = (vi)shifted - (vi)bias;
            rest[r] = (rest[r] - (shifted - bias)) * BASE;
        }
        store_digits(whole, q + d * INPUTS, out->sums[d]);
    }
    out->scale = largest / 127.0f;
    for (int h = 0; h < 2; h++) {
        for (int d = digits - 1; d >= 0; d--) total[h] = total[h] * (1.0f / BASE) + (float)out->sums[d][h];
        out->total[h] = out->scale * total[h];
    }
}

/* ---- products ---- */

/* Not inlined: a compiler would keep the sums in memory from the beginning, and every group would wait for the store of
 * the one before. */
static __attribute__((noinline)) void store_lanes(const Product *p, float *y, int64_t o, int64_t live, vf sums) {
    float lanes[VL];
    store(lanes, sums);
    for (int64_t i = 0; i < live && i < VL; i++) y[i] = lanes[i] + (p->bias ? p->bias[o + i] : 0.0f);
}

INLINE void store_sums(const Product *p, int64_t t, int64_t o, vf sums) {
    const int64_t live = p->part->first + p->part->outputs - o;
    float *y = p->y + t * p->outputs + o;
    if (live >= VL && !p->bias)
        store(y, sums);
    else
        store_lanes(p, y, o, live, sums);
}

/* Token rows at once. On ARM so few that their sums are in registers: in memory every group waits for the store of the one
 * before, which on a Neoverse-N1 made a second token row cost 70% of the first; now it costs 35%. Elsewhere as many as
 * stay in a core's cache: on x86 a second token row costs 7%. */
#if defined(__aarch64__)
#define FEW 5
#else
#define MANY 64
#endif

INLINE const uint8_t *lane_at(const Product *p, int64_t o, int64_t lane_bytes) {
    return p->part->data + (o - p->part->first) / VL * lane_bytes;
}
INLINE int64_t lane_bytes(const Product *p, const Form f) { return p->groups / unit_groups(f) * unit_bytes(f); }

/* Asks for codes that are needed soon, of these weight rows or of the next ones. Processors foresee them only up to the
 * end of a page of memory, and do not fetch while a product with several token rows is busy. */
#define AHEAD 8192 /* bytes */
INLINE void fetch_group(const uint8_t *at, const Form f) {
#if defined(__x86_64__)
    UNROLL for (int64_t i = 0; i < group_bytes(f); i += 64) __builtin_prefetch(at + AHEAD + i, 0, 3);
#else
    (void)at, (void)f; /* a Neoverse-N1 foresees them well enough: 2 to 5% in products alone */
#endif
}

/* VL weight rows with one token row. */
INLINE void multiply_one(const Product *p, int64_t o, const int digits, const Form f) {
    const uint8_t *at = lane_at(p, o, lane_bytes(p, f)), *x = p->x;
    vf sums = {0};
    for (int64_t i = 0; i < p->groups; i += unit_groups(f)) {
        const uint8_t *head = at;
        if (f.is_nested) at += head_bytes(f);
        for (int g = 0; g < unit_groups(f); g++, at += group_bytes(f), x += inputs_bytes(digits)) {
            Group group;
            fetch_group(at, f);
            open_group(head, at, p->part->table, &group, f);
            add_groups(&sums, &group, x, digits, f, 1);
        }
    }
    store_sums(p, 0, o, sums);
}

#if FEW
/* VL weight rows with a few token rows, so many that the compiler knows them. */
INLINE void multiply_few(const Product *p, int64_t o, const int digits, const Form f, const int tokens) {
    const uint8_t *at = lane_at(p, o, lane_bytes(p, f)), *x = p->x + p->first * inputs_bytes(digits);
    vf sums[FEW] = {0};
    for (int64_t i = 0; i < p->groups; i += unit_groups(f)) {
        const uint8_t *head = at;
        if (f.is_nested) at += head_bytes(f);
        for (int g = 0; g < unit_groups(f); g++, at += group_bytes(f), x += p->tokens * inputs_bytes(digits)) {
            Group group;
            open_group(head, at, p->part->table, &group, f);
            UNROLL for (int t = 0; t < tokens; t++)
                add_groups(sums + t, &group, x + t * inputs_bytes(digits), digits, f, 1);
        }
    }
    UNROLL for (int t = 0; t < tokens; t++) store_sums(p, p->first + t, o, sums[t]);
}
#else
/* Twice VL weight rows with many token rows, so that inputs serve more rows; the second half may be the first again. */
INLINE void multiply_many(const Product *p, int64_t o, const int digits, const Form f) {
    const int64_t other = o + VL < p->end ? lane_bytes(p, f) : 0;
    const uint8_t *at = lane_at(p, o, lane_bytes(p, f)), *x = p->x;
    vf sums[MANY][PAIR];
    for (int64_t t = 0; t < p->tokens; t++) sums[t][0] = sums[t][1] = (vf){0};
    for (int64_t i = 0; i < p->groups; i += unit_groups(f)) {
        const uint8_t *head = at;
        if (f.is_nested) at += head_bytes(f);
        for (int g = 0; g < unit_groups(f); g++, at += group_bytes(f)) {
            Group group[PAIR];
            UNROLL for (int l = 0; l < PAIR; l++) fetch_group(at + l * other, f);
            UNROLL for (int l = 0; l < PAIR; l++)
                open_group(head + l * other, at + l * other, p->part->table, group + l, f);
            for (int64_t t = 0; t < p->tokens; t++, x += inputs_bytes(digits))
                add_groups(sums[t], group, x, digits, f, PAIR);
        }
    }
    for (int64_t t = 0; t < p->tokens; t++)
        for (int l = 0; l < (other ? 2 : 1); l++) store_sums(p, t, o + l * VL, sums[t][l]);
}
#endif

typedef void Multiply(const Product *, int64_t);
#define ONE_ROW(form, digits)                                                                                          \
    static void form##_one_##digits(const Product *p, int64_t o) { multiply_one(p, o, digits, FORMS[form]); }
#if FEW
#define ROWS(form, count, digits)                                                                                      \
    static void form##_##count##_##digits(const Product *p, int64_t o) { multiply_few(p, o, digits, FORMS[form], count); }
#define MORE_ROWS(form, digits) ROWS(form, 2, digits) ROWS(form, 3, digits) ROWS(form, 4, digits) ROWS(form, 5, digits)
#define NAMED(form, digits)                                                                                            \
    {form##_one_##digits, form##_2_##digits, form##_3_##digits, form##_4_##digits, form##_5_##digits}
#define WAYS FEW /* by token rows */
#else
#define MORE_ROWS(form, digits)                                                                                        \
    static void form##_many_##digits(const Product *p, int64_t o) { multiply_many(p, o, digits, FORMS[form]); }
#define NAMED(form, digits) {form##_one_##digits, form##_many_##digits}
#define WAYS 2 /* one token row, or several */
#endif
#define VARIANT(form, digits) ONE_ROW(form, digits) MORE_ROWS(form, digits)
#define VARIANTS(form) VARIANT(form, 1) VARIANT(form, 2) VARIANT(form, 3)
#define ALL_NAMED(form) [form] = {NAMED(form, 1), NAMED(form, 2), NAMED(form, 3)},
#define EACH_FORM(use)                                                                                                 \
    use(PACKED_8) use(PACKED_TABLE) use(PACKED_4) use(PACKED_4_LEAST) use(PACKED_5) use(PACKED_5_LEAST)                \
    use(NESTED_TABLE) use(NESTED_4_LEAST) use(NESTED_5_LEAST) use(NESTED_6_HALVES) use(NESTED_3_HALVES)                \
    use(NESTED_2_LEAST_HALVES)
EACH_FORM(VARIANTS)
static Multiply *const PRODUCTS[][MAX_DIGITS][WAYS] = {EACH_FORM(ALL_NAMED)}; /* [form][digits - 1][way] */

/* The lanes of a part that begin within weight rows [from, end), with all token rows. */
static void multiply_part(Multiply *const *ways, Product *p, int64_t from, int64_t end) {
#if FEW
    const int64_t blocks = (p->tokens + FEW - 1) / FEW;
    for (int64_t b = 0; b < blocks; b++) { /* of nearly equal size; their inputs stay close while all lanes meet them */
        p->first = b * p->tokens / blocks;
        Multiply *way = ways[(b + 1) * p->tokens / blocks - p->first - 1];
        for (int64_t o = from; o < end; o += VL) way(p, o);
    }
#else
    const int is_one = p->tokens == 1;
    for (int64_t o = from; o < end; o += is_one ? VL : PAIR * VL) ways[!is_one](p, o);
#endif
}

/* The lanes of every part that begin within weight rows [from, to). */
static void multiply(const Matrix *w, Product *p, int64_t from, int64_t to) {
    const PackedParts *parts = w->data;
    for (int64_t i = 0; i < parts->count; i++) {
        const PackedPart *part = parts->parts + i;
        const int64_t skipped = from > part->first ? (from - part->first + VL - 1) / VL * VL : 0;
        const int64_t end = part->first + part->outputs < to ? part->first + part->outputs : to;
        p->part = part, p->end = end;
        multiply_part(PRODUCTS[part->form][parts->digits - 1], p, part->first + skipped, end);
    }
}

static _Thread_local void *kept_inputs;
static _Thread_local size_t inputs_size;

/* Whether lanes never begin before a piece and end within it. */
int packed_is_aligned(const Matrix *w) {
    const PackedParts *parts = w->data;
    for (int64_t i = 0; i < parts->count; i++)
        if (parts->parts[i].first % VL) return 0;
    return 1;
}

/* Rounds token row t to its places in inputs: Inputs with their digits [groups][tokens]. */
static void round_row(const float *x, int64_t t, int64_t tokens, int64_t groups, int digits, uint8_t *inputs) {
    for (int64_t g = 0; g < groups; g++)
        round_inputs(x + g * INPUTS, inputs + (g * tokens + t) * inputs_bytes(digits), digits);
}

static uint8_t *room_for_inputs(int64_t tokens, int64_t groups, int digits) {
    uint8_t *inputs = kept(&kept_inputs, &inputs_size, groups * tokens * inputs_bytes(digits));
    if (!inputs) abort(); /* nothing would run on without so little */
    return inputs;
}

#define ROWS_TO_SHARE 16 /* so many token rows are rounded by all threads together */

/* Returns rounded token rows. Each thread rounds a few rows for itself, so that none waits for them; many rows lie where
 * thread 0 keeps its own. */
static const uint8_t *round_rows(const float *x, int64_t x_stride, int64_t tokens, int64_t groups, int digits, Team *team) {
    if (tokens < ROWS_TO_SHARE) {
        uint8_t *inputs = room_for_inputs(tokens, groups, digits);
        for (int64_t t = 0; t < tokens; t++) round_row(x + t * x_stride, t, tokens, groups, digits, inputs);
        return inputs;
    }
    Loop loop = start_loop(team, tokens);
    if (loop.self == 0) team->inputs = room_for_inputs(tokens, groups, digits);
    meet(team);
    for (int64_t t; (t = next_piece(&loop)) >= 0;) round_row(x + t * x_stride, t, tokens, groups, digits, team->inputs);
    meet(team);
    return team->inputs;
}

void share_packed_product(const Matrix *w, const float *x, int64_t x_stride, float *y, int64_t tokens,
                          const Gates *gates, Team *team) {
    const int64_t groups = w->inputs / INPUTS;
    const uint8_t *inputs = round_rows(x, x_stride, tokens, groups, (int)((const PackedParts *)w->data)->digits, team);
    Product p = {NULL, inputs, w->bias, y, groups, tokens, w->outputs, 0, 0};
    const int64_t outputs = gates ? gates->width : w->outputs;
    Loop loop = start_loop(team, (outputs + PIECE - 1) / PIECE);
    for (int64_t i; (i = next_piece(&loop)) >= 0;) {
        int64_t from = i * PIECE, to = outputs - from < PIECE ? outputs : from + PIECE;
        multiply(w, &p, from, to);
        if (!gates) continue;
        multiply(w, &p, outputs + from, outputs + to);
        apply_gates(gates, y, w->outputs, 0, tokens, from, to);
    }
    meet(team);
}

void packed_lanes_product(const Matrix *w, const float *x, float *y, const int64_t *lanes, int64_t count) {
    const int digits = (int)((const PackedParts *)w->data)->digits;
    const int64_t groups = w->inputs / INPUTS, step = inputs_bytes(digits);
    uint8_t *inputs = kept(&kept_inputs, &inputs_size, groups * step);
    if (!inputs) abort(); /* nothing would run on without so little */
    for (int64_t g = 0; g < groups; g++) round_inputs(x + g * INPUTS, inputs + g * step, digits);
    Product p = {NULL, inputs, w->bias, y, groups, 1, w->outputs, 0, 0};
    for (int64_t i = 0; i < count; i++) multiply(w, &p, lanes[i] * VL, lanes[i] * VL + VL);
}

/* ---- packing ---- */

/* Where the bits of a code lie: reads it, or adds `code` to zeros. `position`: of its byte in register `r`. */
INLINE int access_code(uint8_t *at, int r, int position, int code, const int writes, const Form f) {
    const int has_nibbles = f.bits >= 4 && f.bits < 8, has_twos = f.bits == 2 || f.bits == 3 || f.bits == 6;
    const int sizes[] = {f.bits == 8 ? 8 : 0, has_nibbles ? 4 : 0, has_twos ? 2 : 0, f.bits & 1};
    int done = 0, found = 0;
    for (int s = 0; s < 4; s++) {
        const int size = sizes[s];
        if (!size) continue;
        uint8_t *byte = at + r % size * REGISTER + position;
        const int shift = r / size * size, mask = (1 << size) - 1;
        if (writes) *byte |= (uint8_t)((code >> done & mask) << shift);
        found |= (*byte >> shift & mask) << done;
        at += size * REGISTER, done += size;
    }
    return found;
}

/* Weight rows as they are unpacked from a file, `rows` of them, into lanes, of which missing ones are filled with zeros. */
void pack_rows(const UnpackedRows *from, uint8_t *out, int64_t form, int threads) {
    const Form f = FORMS[form];
    const int64_t per_unit = unit_groups(f), units = from->inputs / INPUTS / per_unit;
    PARALLEL(threads) {
#pragma omp for
        for (int64_t i = 0; i < (from->rows + VL - 1) / VL * units; i++) {
            uint8_t *unit = out + i * unit_bytes(f);
            memset(unit, 0, unit_bytes(f));
            for (int lane = 0; lane < VL; lane++) {
                const int64_t row = i / units * VL + lane, u = row * units + i % units;
                if (row >= from->rows) continue;
                memcpy(unit + 4 * lane, from->scale + u, 4);
                if (f.has_least) memcpy(unit + 4 * (VL + lane), from->least + u, 4);
                for (int64_t g = 0; g < per_unit; g++) {
                    uint8_t *at = unit + (f.is_nested ? head_bytes(f) : 0) + g * group_bytes(f);
                    for (int h = 0; f.is_nested && h < f.halves; h++) {
                        at[h * VL + lane] = (uint8_t)from->inner_scale[(u * GROUPS + g) * f.halves + h];
                        if (f.has_least)
                            at[(f.halves + h) * VL + lane] = (uint8_t)from->inner_least[(u * GROUPS + g) * f.halves + h];
                    }
                    const uint8_t *codes = from->codes + (u * per_unit + g) * INPUTS;
                    at += group_bytes(f) - f.bits * REGISTER;
                    for (int k = 0; k < INPUTS; k++) access_code(at, k / 4, 4 * lane + k % 4, codes[k], 1, f);
                }
            }
        }
    }
}

void unpack_row(const PackedPart *part, int64_t inputs, int64_t row, float *out) {
    const Form f = FORMS[part->form];
    const int64_t groups = inputs / INPUTS, units = groups / unit_groups(f);
    const int lane = (int)(row % VL);
    for (int64_t g = 0; g < groups; g++) {
        uint8_t *unit = (uint8_t *)part->data + (row / VL * units + g / unit_groups(f)) * unit_bytes(f);
        uint8_t *at = unit + (f.is_nested ? head_bytes(f) : 0) + g % unit_groups(f) * group_bytes(f);
        float scales[2] = {0};
        memcpy(scales, unit + 4 * lane, 4);
        if (f.has_least) memcpy(scales + 1, unit + 4 * (VL + lane), 4);
        for (int k = 0; k < INPUTS; k++) {
            const int h = k * f.halves / INPUTS, inner = f.is_nested ? (int8_t)at[h * VL + lane] : 1;
            const int least = f.is_nested && f.has_least ? (int8_t)at[(f.halves + h) * VL + lane] : 1;
            int code = access_code(at + group_bytes(f) - f.bits * REGISTER, k / 4, 4 * lane + k % 4, 0, 0, f);
            code = f.bits == 8 ? (int8_t)code : f.is_signed ? part->table[code] : code - f.offset;
            out[g * INPUTS + k] = scales[0] * (float)inner * (float)code + scales[1] * (float)least;
        }
    }
}

/* 32 numbers as codes of the form PACKED_4, of which code 0 stands for the number of the largest size. */
static void coarsen_group(const float *x, uint8_t *unit, int lane) {
    const Form f = FORMS[PACKED_4];
    float most = 0.0f;
    for (int k = 0; k < INPUTS; k++) most = fabsf(x[k]) > fabsf(most) ? x[k] : most;
    const float scale = most / (float)-f.offset, inverse = (float)-f.offset / most;
    memcpy(unit + 4 * lane, &scale, 4);
    for (int k = 0; k < INPUTS; k++) {
        const float code = fabsf(inverse) <= FLT_MAX ? floorf(x[k] * inverse + (float)f.offset + 0.5f) : 0.0f;
        access_code(unit + head_bytes(f), k / 4, 4 * lane + k % 4, code < 15 ? (int)code : 15, 1, f);
    }
}

/* The weight rows of a part, rounded to 4 bits: out is a part of the form PACKED_4. */
void coarsen_rows(const PackedPart *part, int64_t inputs, uint8_t *out, int threads) {
    const int64_t units = inputs / INPUTS, size = units * unit_bytes(FORMS[PACKED_4]);
    PARALLEL(threads) {
#pragma omp for
        for (int64_t first = 0; first < part->outputs; first += VL) {
            uint8_t *to = out + first / VL * size;
            float *row = kept(&kept_inputs, &inputs_size, inputs * sizeof(float));
            if (!row) abort();
            memset(to, 0, size);
            for (int lane = 0; lane < VL && first + lane < part->outputs; lane++) {
                unpack_row(part, inputs, first + lane, row);
                for (int64_t u = 0; u < units; u++)
                    coarsen_group(row + u * INPUTS, to + u * unit_bytes(FORMS[PACKED_4]), lane);
            }
        }
    }
}

/* Some weight rows of a part as the numbers that they stand for. */
void unpack_rows(const PackedPart *part, int64_t inputs, const int64_t *rows, int64_t count, float *out, int threads) {
    PARALLEL(threads) {
#pragma omp for
        for (int64_t i = 0; i < count; i++) unpack_row(part, inputs, rows[i], out + i * inputs);
    }
}

/* One lane of `runs` runs of VL pieces. Returns what lies behind them. */
INLINE int64_t copy_lane(const uint8_t *from, int lane, uint8_t *to, int to_lane, int64_t at, int64_t runs, const int size) {
    for (int64_t r = 0; r < runs; r++, at += VL * size) memcpy(to + at + to_lane * size, from + at + lane * size, size);
    return at;
}

/* Some weight rows of a part, packed in the same form; missing ones of the last lanes are zeros. */
void take_packed_rows(const PackedPart *part, int64_t inputs, const int64_t *rows, int64_t count, uint8_t *out,
                      int threads) {
    const Form f = FORMS[part->form];
    const int64_t units = inputs / INPUTS / unit_groups(f), size = units * unit_bytes(f);
    PARALLEL(threads) {
#pragma omp for
        for (int64_t first = 0; first < count; first += VL) {
            uint8_t *to = out + first / VL * size;
            memset(to, 0, size);
            for (int lane = 0; lane < VL && first + lane < count; lane++) {
                const int64_t row = rows[first + lane];
                const uint8_t *from = part->data + row / VL * size;
                const int own = (int)(row % VL);
                for (int64_t u = 0, at = 0; u < units; u++) {
                    at = copy_lane(from, own, to, lane, at, 1 + f.has_least, 4);
                    for (int64_t g = 0; g < unit_groups(f); g++) {
                        if (f.is_nested) at = copy_lane(from, own, to, lane, at, (1 + f.has_least) * f.halves, 1);
                        at = copy_lane(from, own, to, lane, at, f.bits, 4);
                    }
                }
            }
        }
    }
}
