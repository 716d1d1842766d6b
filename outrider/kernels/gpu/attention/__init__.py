"""Paged attention over keys and values.

Begin with `core.py`, which attends for one tile of queries, then read `decode.py` (few queries for each request) and
`prefill.py` (prompts). `splits.py` plans a launch of decoding and `merge.py` joins what it has split. `sharing.py` and
`packs.py` read pages once that several requests share. `exact_attention.py` serves exact mode.
"""
