"""Linear layers, by the number of token rows and the kind of weight.

Begin with `thin.py` (1 to 64 token rows), then `matvec.py` (1 to 4) and `split.py` (few outputs). `scaled.py`
multiplies with weights of codes and scales: `scaled_codes.py` decodes them, `rounding.py` rounds token rows to fp8.
`exact_linear.py` serves exact mode. Kernels for Hopper cards are in `hopper/`; the tables in `kernels/ops/products.py`
and `kernels/ops/coded.py` say which one runs.
"""
