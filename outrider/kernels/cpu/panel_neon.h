/* Products of a panel of weight rows, as floats in the nearest cache, with four token rows at once, in NEON registers.
 *
 * Four weight rows by four token rows take sixteen sums, for which eight vectors are loaded: loads and multiplications
 * of a Neoverse N1 are in balance then, if the loads for the next vectors are spread among the multiplications of these.
 * A compiler does not do that, and reaches four fifths of it. Registers:
 *   v0 to v15              sums, four for each token row
 *   v16 to v19, v20 to v23 vectors of token rows and of weight rows
 *   v24 to v27, v28 to v31 the same, one step on
 */
#pragma once
#include "native.h"

#define PANEL_ROWS 4 /* weight rows that lie side by side in a panel, as token rows do: vectors of the same inputs */

#define ROW_BY_WEIGHT(sum, x, w) "fmla v" #sum ".4s, v" #x ".4s, v" #w ".4s\n"
#define ROW_BY_TWO(s, t, x, w, v) ROW_BY_WEIGHT(s, x, w) ROW_BY_WEIGHT(t, x, v)
#define NEXT_TWO(pointer, a, b) "ldp q" #a ", q" #b ", [%[" #pointer "]], #32\n"

/* Vectors in registers are multiplied; `first` to `last` are the loads that happen meanwhile. */
#define PANEL_STEP(x0, x1, x2, x3, w0, w1, w2, w3, first, second, third, last)                                         \
    ROW_BY_WEIGHT(0, x0, w0) first ROW_BY_WEIGHT(1, x0, w1) ROW_BY_TWO(4, 5, x1, w0, w1) second                        \
    ROW_BY_TWO(2, 3, x0, w2, w3) ROW_BY_TWO(6, 7, x1, w2, w3) third                                                    \
    ROW_BY_TWO(8, 9, x2, w0, w1) ROW_BY_TWO(10, 11, x2, w2, w3) last                                                   \
    ROW_BY_TWO(12, 13, x3, w0, w1) ROW_BY_TWO(14, 15, x3, w2, w3)
#define TO_ONE_STEP_ON                                                                                                 \
    PANEL_STEP(16, 17, 18, 19, 20, 21, 22, 23, NEXT_TWO(x, 24, 25), NEXT_TWO(w, 28, 29), NEXT_TWO(x, 26, 27),          \
               NEXT_TWO(w, 30, 31))
#define AND_BACK                                                                                                       \
    PANEL_STEP(24, 25, 26, 27, 28, 29, 30, 31, NEXT_TWO(x, 16, 17), NEXT_TWO(w, 20, 21), NEXT_TWO(x, 18, 19),          \
               NEXT_TWO(w, 22, 23))

#define PANEL_CLEAR(a, b) "movi v" #a ".4s, #0\nmovi v" #b ".4s, #0\n"
/* Neighbours first, as `sum_each` adds; a token row's four results become one vector. */
#define PANEL_ADD(a, b, c, d)                                                                                          \
    "faddp v" #a ".4s, v" #a ".4s, v" #b ".4s\nfaddp v" #c ".4s, v" #c ".4s, v" #d ".4s\n"
#define PANEL_STORE(a, c) "faddp v" #a ".4s, v" #a ".4s, v" #c ".4s\nstr q" #a ", [%[y]]\nadd %[y], %[y], %[stride]\n"

/* Products of four packed token rows with four packed weight rows of `vectors` vectors each, with the sums of
 * `product_tile`: a vector for each token row, `stride` floats apart. Reads 64 bytes behind the end of both. */
INLINE void multiply_panel(const float *x, const float *w, int64_t vectors, float *y, int64_t stride) {
    __asm__ volatile(NEXT_TWO(x, 16, 17) NEXT_TWO(w, 20, 21) NEXT_TWO(x, 18, 19) NEXT_TWO(w, 22, 23)
                     PANEL_CLEAR(0, 1) PANEL_CLEAR(2, 3) PANEL_CLEAR(4, 5) PANEL_CLEAR(6, 7)
                     PANEL_CLEAR(8, 9) PANEL_CLEAR(10, 11) PANEL_CLEAR(12, 13) PANEL_CLEAR(14, 15)
                     "tbz %[n], #0, 2f\n"
                     PANEL_STEP(16, 17, 18, 19, 20, 21, 22, 23, "", "", "", "")
                     NEXT_TWO(x, 16, 17) NEXT_TWO(w, 20, 21) NEXT_TWO(x, 18, 19) NEXT_TWO(w, 22, 23)
                     "2:\nlsr %[n], %[n], #1\ncbz %[n], 3f\n"
                     "1:\n" TO_ONE_STEP_ON "subs %[n], %[n], #1\n" AND_BACK "b.ne 1b\n"
                     "3:\n" PANEL_ADD(0, 1, 2, 3) PANEL_ADD(4, 5, 6, 7) PANEL_ADD(8, 9, 10, 11) PANEL_ADD(12, 13, 14, 15)
                     PANEL_STORE(0, 2) PANEL_STORE(4, 6) PANEL_STORE(8, 10) PANEL_STORE(12, 14)
                     : [x] "+r"(x), [w] "+r"(w), [n] "+r"(vectors), [y] "+r"(y)
                     : [stride] "r"(stride * (int64_t)sizeof(float))
                     : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11",
                       "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24",
                       "v25", "v26", "v27", "v28", "v29", "v30", "v31");
}
