"""Attention to the blocks of a context that an indexer chooses.

Qwen4-Exp keeps keys and values like other attention and chooses *blocks* of a few tokens (`cache/kinds/indexed.py`,
`mixers/indexed/`, `kernels/token_blocks.py`). A block has one index key, made of the mean of its tokens' keys when the
last of them is written. It lies in that token's cell, so that rejected drafts are simply overwritten, and the kernels
that choose positions of latent layers choose blocks in a strided view of the same pages. Batches whose contexts are
chosen whole go to the attention backend.

GLM5-Next chooses blocks over latents (`PooledPositions`, `kernels/pooled_keys.py`). The key of a block is a sum of
its tokens' keys, weighed by a softmax of learned gates, so every token keeps its gate beside its key. Chosen blocks
become a list of positions, which the kernels of latent attention read as they read any choice. Its latents have no
rotating dimensions.
"""
