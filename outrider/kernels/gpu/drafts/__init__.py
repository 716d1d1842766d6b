"""Drafts: the bookkeeping of proposals, and the small kernels of drafters.

Begin with `passes.py` (the passes of a drafter), `blocks.py` (of a block drafter) and `first_slots.py` (of admitted
rows). `entry.py` stores drafts in the rows, `share.py` divides a step's token rows among them. `ngram.py` looks up
n-grams, `join.py` makes the inputs of draft heads, `synthetic.py` replaces verdicts for benchmarks, `distillation.py`
is a loss for training.
"""
