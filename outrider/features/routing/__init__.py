"""Routed experts: the experts that each layer chose for every token of a request, as trainers replay them.

`on_device.py` copies the choices of every step to the host; a step's result has those of the tokens that it has
settled, without rejected drafts. `in_engine.py` joins them for each sample. A request takes no prefix hits, because a
cached page does not say which experts computed it.
"""
