"""Kernels for Hopper GPUs, written in Gluon: some warps fetch data into shared memory, and groups of warps multiply.

The table of operations and the wrappers in other folders choose when a Hopper kernel runs. Most of these kernels share
`items.py` (which work a program takes) and `fetch.py` (copies of cache pages to shared memory).

- prefill attention: `prefill.py` launches the kernel, and `attend.py` is what its multiplying warps run
- attention over the latent cache (MLA): `latent.py` for many token rows, `latent_decode.py` for few
- scores of the sparse attention's indexer: `index.py` for many token rows, `index_decode.py` for few
- linear layers: `few_rows.py` for up to 64 token rows, `products.py` for exact mode, `coded/` for quantised weights
"""
