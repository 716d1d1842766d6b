"""Chooses settings with which a model fits a device's memory: context, requests at once, tokens of a step, the type of
the cache, the bits of weights. No weight is read.

    room.py            how much memory there is: of this machine's device, or of one that is only named
    outline.py         the model's tensors, cache and rows on the meta device, in one form of weights and cache
    step_estimate.py   the memory of the largest step, which only a device can measure
    forms.py           forms of weights and cache, in the order of what their rounding costs
    search.py          the best plan of all forms, and what stands in the way where none fits
    choice.py          the plan as settings, as lines for people and as data for scripts
    at_start.py        the same choice for an engine that starts, and advice for one that has no room

The arithmetic of pages is `runner/memory.py`'s, which an engine that starts uses too. The core imports this folder only
if the setting `fit` is on, or to explain why an engine does not fit.
"""
