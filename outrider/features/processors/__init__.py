"""Logits processors: an operator's own classes, which change logits before a token is chosen.

`outrider/logits_processors.py` has the base class of these classes (vLLM's interface). `rows.py` runs the processors
over the logit rows of each step; `on_device.py` and `in_engine.py` are the feature's parts in the worker and the
engine.
"""
