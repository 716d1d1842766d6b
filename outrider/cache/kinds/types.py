"""CacheType: how the keys and values of a token are stored in pages. No torch.

The codec with the type's name (`mixers/paged/codecs.py`) converts keys and values to the tensors that are declared
here, and back."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.cache.kinds.parts import Part


@dataclass(frozen=True)
class CacheType:
    """The base class, which stores keys and values in the model's dtype. A subclass stores them in another form. Two of
    its tensors must have the names "k" and "v"."""

    name: str  # value of the setting kv_cache_dtype

    def parts(self, num_kv_heads: int, head_dim: int, itemsize: int) -> tuple[Part, ...]:
        """Return the tensors that are kept for every token, in the order in which they lie in a page. itemsize: bytes
        of one number in the model's dtype."""
        shape = (num_kv_heads, head_dim)
        return Part("k", shape, itemsize), Part("v", shape, itemsize)


@dataclass(frozen=True)
class ElementType(CacheType):
    """A cache type that stores keys and values as numbers of one dtype, perhaps with scales."""

    dtype: str  # name of a torch dtype, such as "int8"
    itemsize: int  # bytes of one number
    head_parts: tuple[Part, ...] = ()  # further tensors, such as scales; their shapes are those of one token and head
    takes_latents: bool = False  # whether latents, of which all heads share one, may be stored in this dtype

    def parts(self, num_kv_heads: int, head_dim: int, itemsize: int) -> tuple[Part, ...]:
        numbers = [Part(name, (num_kv_heads, head_dim), self.itemsize, self.dtype) for name in ("k", "v")]
        return *numbers, *(replace(part, shape=(num_kv_heads, *part.shape)) for part in self.head_parts)


MODEL_CACHE = CacheType("auto")
