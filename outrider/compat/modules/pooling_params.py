"""Stands for `vllm.pooling_params`: exports PoolingParams."""

from outrider import PoolingParams

__all__ = ["PoolingParams"]
