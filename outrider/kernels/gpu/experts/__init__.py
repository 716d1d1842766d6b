"""Mixtures of experts.

`router.py` chooses the experts of each token row. Begin with `moe.py` for their products: `pairs.py` lists which token
rows go to which expert, and `rows.py` serves one or two token rows. `scaled.py` and `coded_rows.py` do the same for
weights of codes with scales. `biases.py` is the activation of experts with biases; `shared.py` adds a shared expert.
"""
