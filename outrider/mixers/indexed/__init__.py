"""Attention to the stretches of a context that an indexer chooses.

Qwen4-Exp keeps keys and values like other attention and chooses *stretches* of a few tokens (`cache/kinds/indexed.py`,
`mixers/indexed/`, `kernels/stretches.py`). A stretch has one index key, made of the mean of its tokens' keys when the
last of them is written. It lies in that token's cell, so that rejected drafts are simply overwritten, and the kernels
that choose positions of latent layers choose stretches in a strided view of the same pages. Batches whose contexts are
chosen whole go to the attention backend.

GLM5-Next chooses stretches over latents (`PooledPositions`, `kernels/pooled_keys.py`). The key of a stretch is a sum of
its tokens' keys, weighed by a softmax of learned gates, so every token keeps its gate beside its key. Chosen stretches
become a list of positions, which the kernels of latent attention read as they read any choice. Its latents have no
rotating dimensions.
"""
