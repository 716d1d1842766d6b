"""Codecs: how each KV cache type writes keys and values to the pool and reads them back, in plain torch.

Attention reads decoded values, also for the tokens of the running step and for drafts. A query thus never sees keys
before they were rounded, so that tokens do not depend on how a request was divided into steps. `register_cache_type`
adds a cache type from outside the package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch

from outrider.cache.kinds import MODEL_CACHE, CacheType, ElementType
from outrider.config import CACHE_TYPES as SETTINGS
from outrider.kernels.fp8_cache import HeadScales, ScaleNumbers, from_fp8, to_fp8
from outrider.kernels.reference import contain_non_finite

FP8_NAMES = ("fp8", "fp8_e4m3")  # of the same type
Parts = Mapping[str, torch.Tensor]  # tensors by the names of their parts


class DecodedTokens(NamedTuple):
    """Cached tokens in the dtype of the queries. Keys and values of bad tokens (those that were not finite) are
    arbitrary."""

    k: torch.Tensor  # [..., kv heads, dim]
    v: torch.Tensor  # [..., kv heads, dim]
    is_finite: torch.Tensor  # [...] False for bad tokens


class CacheCodec(ABC):
    """Encodes and decodes the tokens of one cache type, each token by itself.

    A bad token is one whose keys or values are not finite. `encode` must mark it in the stored parts by something that
    no other token has, and `decode` must report it as not finite. Attention then fails every query that may see the
    token, and no other query is affected."""

    cache_type: CacheType
    is_exact: bool = False  # whether a token has the same bits alone and among others; otherwise exact mode refuses it
    scales: HeadScales | None = None  # of a layer's heads, for types that have such scales

    def for_layer(self, num_kv_heads: int, device: torch.device, scales: ScaleNumbers | None) -> CacheCodec:
        """Make the codec of one layer. scales: the layer's scales in the model's files."""
        return self

    @abstractmethod
    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Parts:
        """Encode new tokens as the parts to store, [tokens, *shape] each, from k and v [tokens, kv heads, dim] in the
        model's dtype. There may be no tokens."""

    @abstractmethod
    def decode(self, parts: Parts, dtype: torch.dtype) -> DecodedTokens:
        """Decode stored parts [..., *shape] to the dtype of the queries. Cells to which no token was written have
        arbitrary bytes; their results are unused."""


class ModelCodec(CacheCodec):
    """Stores keys and values in the model's dtype. A bad token is marked by keys of NaN and has values of 0."""

    cache_type = MODEL_CACHE
    is_exact = True

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Parts:
        k, v = contain_non_finite(k, v)
        return {"k": k, "v": v}

    def decode(self, parts: Parts, dtype: torch.dtype) -> DecodedTokens:
        k, v = parts["k"], parts["v"]
        return DecodedTokens(k.to(dtype), v.to(dtype), ~k[..., 0, 0].isnan())


class FloatCodec(ModelCodec):
    """Stores keys and values in another float type. A number beyond that type's range makes a bad token."""

    def __init__(self, name: str) -> None:
        self._dtype: torch.dtype = getattr(torch, name)
        self.cache_type = ElementType(name, name, self._dtype.itemsize)

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Parts:
        return super().encode(k.to(self._dtype), v.to(self._dtype))


class Fp8Codec(ModelCodec):
    """Stores keys and values as fp8 numbers (e4m3), divided by one scale for each head. Larger numbers than fp8 can
    hold become the largest fp8 number. Scales come from the model's files or are 1, and never depend on the tokens."""

    def __init__(self, name: str, scales: HeadScales | None = None) -> None:
        self.cache_type = ElementType(name, "float8_e4m3fn", 1, takes_latents=True)
        self.scales = scales

    def for_layer(self, num_kv_heads: int, device: torch.device, scales: ScaleNumbers | None) -> CacheCodec:
        ones = (1.0,) * num_kv_heads
        return Fp8Codec(self.cache_type.name, (scales or ScaleNumbers(ones, ones)).to_device(device))

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Parts:
        assert self.scales is not None, "the codec belongs to no layer"
        k, v = contain_non_finite(k, v)
        return {"k": to_fp8(k, self.scales.k[:, None]), "v": to_fp8(v, self.scales.v[:, None])}

    def decode(self, parts: Parts, dtype: torch.dtype) -> DecodedTokens:
        assert self.scales is not None, "the codec belongs to no layer"
        k, v = parts["k"], parts["v"]
        return DecodedTokens(from_fp8(k, self.scales.k[:, None], dtype), from_fp8(v, self.scales.v[:, None], dtype),
                             ~k[..., 0, 0].isnan())


_CODECS: dict[str, CacheCodec] = {}


def register_cache_type(codec: CacheCodec) -> None:
    """Make a cache type available: `kv_cache_dtype` may name it, and `codec` writes and reads it."""
    name = codec.cache_type.name
    _CODECS[name] = codec
    if name not in SETTINGS:
        SETTINGS.append(name)


def codec_of(cache_type: CacheType) -> CacheCodec:
    return _CODECS[cache_type.name]


def find_cache_type(name: str, dtype: torch.dtype) -> CacheType:
    """Return the cache type that the setting `kv_cache_dtype` names. The name of the model's dtype means the same as
    "auto"."""
    if name == str(dtype).removeprefix("torch."):
        return MODEL_CACHE
    if name not in _CODECS:
        raise ValueError(f"kv_cache_dtype={name!r} is not registered in the worker's process, which imports the main "
                         "module anew: call register_cache_type at the top level of that module")
    return _CODECS[name].cache_type


register_cache_type(ModelCodec())
for _name in ("float32", "bfloat16", "float16", "float64"):
    register_cache_type(FloatCodec(_name))
for _name in FP8_NAMES:
    register_cache_type(Fp8Codec(_name))
