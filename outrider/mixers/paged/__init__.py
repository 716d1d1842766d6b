"""Attention over keys and values in pages.

A layer may carry a *mask* beside the causal rule and its window, and a step may have *extra keys*: ranges of a prompt
whose tokens see each other in both directions (`mixers/paged/masks.py`). Kernels written by hand know neither: the
`flex` backend (`mixers/paged/flex_backend.py`) hands both to torch's FlexAttention, compiled once, with a page as its
block of keys, and the `torch` backend computes them plainly. Keys and values of such a range depend on the whole range,
so one step computes it, and no prefix hit ends within it (`core/input_part.py`). Steps with extra keys run uncaptured;
masks alone are captured.

In fp8 (`kernels/fp8_cache.py` and `kernels/gpu/pages/fp8.py`) a stored number is divided by the scale of its kv
head,
and rounded by the kernel that writes it. Scales come from the model's files (`Model.cache_scales`) or are 1. Reading
kernels multiply stored numbers as float16 numbers, which are the same, and fold the scales into scores and results.
Latents are stored in fp8 without a scale. `runner/cache_plan.py` lists the sizes of heads and latents that a GPU
serves.
"""
