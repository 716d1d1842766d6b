"""Products with quantised weights (codes with scales) on Hopper GPUs.

`rows.py` launches the kernel for 1 to 64 token rows, `tiles.py` the kernel for more. The kernels themselves are in
`rows_kernel.py` and `tiles_kernel.py`.
"""
