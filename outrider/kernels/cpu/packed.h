/* The forms of packed weights, of which packed.c tells, and where their parts lie. */
#pragma once
#include "native.h"

#define INPUTS 32          /* of a group */
#define GROUPS 8           /* that share a scale in float32, in the forms that have scales of scales */
#define REGISTER (4 * VL)  /* bytes: codes of four inputs of VL weight rows */

typedef struct {
    int bits;      /* of a code */
    int offset;    /* taken from every code */
    int has_least; /* whether a value is added to each scaled code */
    int is_nested; /* whether scales have scales */
    int halves;    /* scales of a group: one, or two for 16 inputs each */
    int is_signed; /* whether codes are numbers with a sign: 8 bits, or found in a table by 4 bits */
} Form;

static const Form FORMS[] = {
    [PACKED_8] = {8, 0, 0, 0, 1, 1},         [PACKED_TABLE] = {4, 0, 0, 0, 1, 1},
    [PACKED_4] = {4, 8, 0, 0, 1, 0},         [PACKED_4_LEAST] = {4, 0, 1, 0, 1, 0},
    [PACKED_5] = {5, 16, 0, 0, 1, 0},        [PACKED_5_LEAST] = {5, 0, 1, 0, 1, 0},
    [NESTED_TABLE] = {4, 0, 0, 1, 1, 1},     [NESTED_4_LEAST] = {4, 0, 1, 1, 1, 0},
    [NESTED_5_LEAST] = {5, 0, 1, 1, 1, 0},   [NESTED_6_HALVES] = {6, 32, 0, 1, 2, 0},
    [NESTED_3_HALVES] = {3, 4, 0, 1, 2, 0},  [NESTED_2_LEAST_HALVES] = {2, 0, 1, 1, 2, 0},
};

INLINE int64_t head_bytes(const Form f) { return (1 + f.has_least) * VL * 4; }
INLINE int64_t group_bytes(const Form f) {
    return f.bits * REGISTER + (f.is_nested ? (1 + f.has_least) * f.halves * VL : head_bytes(f));
}
INLINE int64_t unit_groups(const Form f) { return f.is_nested ? GROUPS : 1; }
INLINE int64_t unit_bytes(const Form f) { return f.is_nested ? head_bytes(f) + GROUPS * group_bytes(f) : group_bytes(f); }
