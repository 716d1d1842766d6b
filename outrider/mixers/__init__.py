"""The batch as kernels see it, and the attention backends."""
