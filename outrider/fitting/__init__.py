"""Chooses settings with which a model fits a device's memory: context length, requests at once, tokens of a step, the
KV cache dtype, and the quantization of weights. No weight is read.

    room.py            how much memory a device has: one of this machine, or a GPU that is only described
    outline.py         the model's tensors, cache and rows on the meta device, for one choice of quantization
    step_estimate.py   the memory of the largest step, which only a device can measure
    forms.py           choices of quantization for weights and cache, ordered by how much quality they lose
    search.py          the best plan over all choices, and the reason why none fits
    choice.py          the plan as settings, as lines for people and as data for scripts
    at_start.py        the same choice for an engine that starts, and advice for one that has too little memory

The page counts come from `runner/memory.py`, which a starting engine uses too. The core imports this folder only if the
setting `fit` is on, or to explain why an engine does not fit.
"""
