"""Sampling: from a step's logits to tokens and their log-probabilities.

Begin with `draw.py`, which draws without filters. `edits.py` changes logits before (bias, penalties, grammars), with
the counts of `token_counts.py`. `filtered_draw.py` draws with min-p, top-k and top-p; `candidates.py`, `rejection.py`,
`masses.py` and `scans.py` are its parts. `logprobs.py` reports.
"""
