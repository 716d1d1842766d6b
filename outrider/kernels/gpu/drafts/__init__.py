"""Drafts: the bookkeeping of a step's proposal of drafts, and the small kernels of drafters.

Begin with `passes.py`, which plans the passes of a drafter (cache slots, positions, lengths). `blocks.py` does this for
a block drafter, and `first_slots.py` for newly admitted requests. `entry.py` stores drafts in the batch rows,
`share.py` divides a step's token rows among drafts. `ngram.py` looks up n-grams, `join.py` makes the inputs of draft
heads, `synthetic.py` accepts drafts at chosen rates for benchmarks, `distillation.py` is a loss for training.
"""
