"""Writing keys and values to the slots of their tokens.

`cache_write.py` stores them as they are, `rope_cache.py` after norms and rotation. `fp8.py` has the conversions for
pages of fp8 numbers, which attention uses too.
"""
