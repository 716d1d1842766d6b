"""Stands for `vllm.version`: the version of vLLM that the names here follow. Outrider's own version is
`outrider.__version__`."""

from outrider.compat.alias import VLLM_VERSION

__all__ = ["__version__", "__version_tuple__"]

__version__ = VLLM_VERSION
__version_tuple__ = tuple(int(part) for part in VLLM_VERSION.split("."))
