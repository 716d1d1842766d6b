"""outrider.pooling_params: the place of PoolingParams in vLLM."""

from outrider import PoolingParams

__all__ = ["PoolingParams"]
