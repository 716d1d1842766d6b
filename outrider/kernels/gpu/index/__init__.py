"""The indexer of sparse attention: which positions or blocks of its context a token attends to.

Begin with `scores.py`, then `choice.py` (few token rows) and `prefill.py` (many), which choose the best scores with the
parts in `search.py`. `pooled_keys.py` and `token_blocks.py` serve models that choose whole blocks.
"""
