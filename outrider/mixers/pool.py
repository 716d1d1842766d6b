"""The pool's device memory: one buffer of equal pages, seen by each layer through its group's geometry.

A page's bytes are contiguous over the layers of its group, so that one copy moves it. Which page is whose is not
known here.
"""

from __future__ import annotations

import torch

from outrider.cache.groups import CacheLayout


class DevicePool:
    def __init__(self, layout: CacheLayout, num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        assert layout.page_bytes % dtype.itemsize == 0
        self.data = torch.zeros(num_pages, layout.page_bytes // dtype.itemsize, dtype=dtype, device=device)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer: [pages, page tokens, kv heads, dim] each, views of the pool."""
        group_index, part = self.layout.places[layer]
        group = self.layout.groups[group_index]
        spec = group.spec
        tensor = group.page_tokens * spec.num_kv_heads * spec.head_dim
        shape = (self.data.shape[0], group.page_tokens, spec.num_kv_heads, spec.head_dim)
        strides = (self.data.stride(0), spec.num_kv_heads * spec.head_dim, spec.head_dim, 1)
        k, v = (self.data.as_strided(shape, strides, (2 * part + i) * tensor) for i in range(2))
        return k, v

    def clear(self, pages: torch.Tensor) -> None:
        self.data.index_fill_(0, pages, 0)

    def poison(self, pages: torch.Tensor) -> None:
        """Tests: what nobody owns must never be seen."""
        self.data.index_fill_(0, pages, torch.nan)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()
