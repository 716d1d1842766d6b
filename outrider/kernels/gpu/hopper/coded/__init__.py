"""Products with weights of codes and scales on Hopper cards.

`rows.py` launches the kernel for 1 to 64 token rows, `tiles.py` the one for more. The parts of these kernels are in
`rows_kernel.py` and `tiles_kernel.py`.
"""
