"""Norms, activations and residual streams: operations that compute each token row alone, without a weight matrix.

Begin with `norm.py` (RMS norm) and `activation.py` (gated activations). `gated_norm.py` norms the outputs of recurrent
layers. `streams.py` and `hyper_streams.py` mix several residual streams.
"""
