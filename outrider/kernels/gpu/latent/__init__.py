"""Attention over the latent cache (MLA), where all heads share one entry for each position.

Begin with `inputs.py` (norms, ropes, cache writes), then `attention.py`. `head_products.py` brings queries into the
latent space and values out of it. `enter_latents.py` and `values.py` join two such launches into one for few token
rows. `exact_latent.py` serves exact mode.
"""
