"""Kernels for Hopper GPUs, written in Gluon: some warps fetch data into shared memory, and groups of warps multiply.

The table of operations and the wrappers in other folders choose them. `items.py` and `fetch.py` have what most of these
kernels share: how a program gets its work, and the copies of pages and weights into rings of tiles.

- attention: `prefill.py` launches it, and `attend.py` has the groups of warps that multiply
- latent attention and its indexer: `latent.py`, `latent_decode.py`, `index.py`, `index_decode.py`
- matrix products: `few_rows.py`, `products.py` (exact mode), `coded/` (weights that are codes with scales)
"""
