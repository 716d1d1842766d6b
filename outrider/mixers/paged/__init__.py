"""Attention over keys and values in pages.

A layer may have a *mask* in addition to the causal rule and its window. A step may have *extra keys*: ranges of a
prompt whose tokens see each other in both directions (`mixers/paged/masks.py`). Hand-written kernels support neither.
The `flex` backend (`mixers/paged/flex_backend.py`) passes both to torch's FlexAttention, compiled once, with a page as
its block of keys, and the `torch` backend computes them plainly. Keys and values of such a range depend on the whole
range, so one step computes it, and no prefix hit ends within it (`core/input_part.py`). Steps with extra keys run
uncaptured; steps that only have masks are captured.

In an fp8 cache (`kernels/fp8_cache.py` and `kernels/gpu/pages/fp8.py`) a stored number is divided by the scale of its
kv head, and rounded by the kernel that writes it. Scales come from the model's files (`Model.cache_scales`) or are 1.
Reading kernels convert stored numbers to float16, which is exact, and multiply scores and results by the scales.
Latents are stored in fp8 without a scale. `runner/cache_plan.py` lists the head and latent sizes that a GPU serves.
"""
