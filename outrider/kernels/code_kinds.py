"""The kinds of short codes in which quantised weights are stored (`kernels.scaled.Scaled`)."""

FP8, INT8, INT4, FP4 = "fp8", "int8", "int4", "fp4"  # e4m3, two integers, e2m1
CODES = (FP8, INT8, INT4, FP4)
