"""Mixtures of experts.

`router.py` chooses the experts of each token row. `moe.py` multiplies them with their experts' weights; begin there.
`pairs.py` lists which token rows go to which expert, and `rows.py` serves one or two token rows. `scaled.py` and
`coded_rows.py` do the same for quantised weights (codes with scales). `biases.py` is the activation of experts with
biases; `shared.py` adds a shared expert.
"""
