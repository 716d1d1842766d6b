"""Recurrent layers: Mamba-2, short convolutions, and the kernels that every recurrence needs around it.

Begin with `step_tensors.py`, which says what a row keeps. `inputs.py` makes the inputs of all recurrences, and
`save_tails.py` copies them to checkpoints. `mamba2.py` and `mamba2_scan.py` (long runs, in chunks) are Mamba-2,
`short_conv.py` is LFM2. The gated delta rule has a folder of its own."""
