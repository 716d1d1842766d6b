"""LoRA adapters, several in one batch.

Begin with `slots.py`, which sorts token rows by adapter, then `linear.py`, the two products of a linear layer.
`heads.py` adapts latent expansions and `experts.py` the experts of a mixture.
"""
