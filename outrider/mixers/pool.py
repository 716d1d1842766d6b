"""DevicePool: the device memory of all cache pages. It is one buffer; each layer has views of it in the shape of its
group.

The bytes of a page are contiguous: first the layers of the page's group, including a drafter's layers, then data that
is kept once for each page. One copy therefore moves a page with everything that belongs to it. The cache manager, not
the pool, records which request owns a page."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.cache.groups import CacheLayout
from outrider.cache.kinds import MODEL_DTYPE, Part
from outrider.core import PageChanges
from outrider.kernels.buffers import lazy_zeros, to_device
from outrider.kernels.fp8_cache import ScaleNumbers


class DevicePool:
    def __init__(self, layout: CacheLayout, num_pages: int, dtype: torch.dtype, device: torch.device,
                 scales: Mapping[int, ScaleNumbers] | None = None) -> None:
        """scales: the scales of fp8 layers, by layer, for the layers whose scales are in the model's files."""
        self.layout = layout
        self.dtype = dtype
        assert layout.page_bytes % dtype.itemsize == 0
        self.data = lazy_zeros(num_pages, layout.page_bytes // dtype.itemsize, dtype=dtype, device=device)
        self._scales = {layout.places[layer]: own for layer, own in (scales or {}).items()}

    def scales_of(self, layer: int) -> ScaleNumbers | None:
        """Return the scales of a layer's heads. Layers that share their pages share their scales."""
        return self._scales.get(self.layout.places[layer])

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Return the parts of one layer's cache by name: views [pages, page tokens, *shape] of the pool."""
        views: dict[str, torch.Tensor] = {}
        for group_index, member in self.layout.places[layer]:
            group = self.layout.groups[group_index]
            start = member * group.page_tokens * group.spec.token_bytes
            for part in group.spec.parts:
                views[part.name] = self._view(part, (group.page_tokens, *part.shape), start)
                start += group.page_tokens * part.num_bytes
        return views

    def page_parts(self, layer: int) -> dict[str, torch.Tensor]:
        """Return the parts that a layer keeps once for each page, by name: views [pages, *shape] of the pool."""
        return {placed.part.name: self._view(placed.part, placed.part.shape, placed.start)
                for placed in self.layout.page_parts if placed.layer == layer}

    def _view(self, part: Part, shape_in_page: tuple[int, ...], start: int) -> torch.Tensor:
        """Return the view of a part that begins `start` bytes into every page."""
        data = self.data if part.dtype == MODEL_DTYPE else self.data.view(getattr(torch, part.dtype))
        assert data.element_size() == part.itemsize, f"part {part.name!r} has elements of {part.itemsize} bytes"
        assert start % part.itemsize == 0, f"part {part.name!r} does not begin at a whole element"
        in_page = torch.empty(shape_in_page, device="meta")
        shape, strides = (len(data), *in_page.shape), (data.stride(0), *in_page.stride())
        return data.as_strided(shape, strides, start // part.itemsize)

    def copy_page(self, page: int) -> torch.Tensor:
        """Copy everything that belongs to a page to the host: [page_bytes] uint8."""
        return self.data[page].view(torch.uint8).to("cpu", copy=True)

    def restore_page(self, page: int, copied: torch.Tensor) -> None:
        """Overwrite a page with bytes from `copy_page`, which may be those of another page."""
        self.data[page].view(torch.uint8).copy_(copied)

    def apply(self, changes: PageChanges) -> None:
        """Zero the pages that a step needs cleared before it runs. Pages are filled as wide integers, because filling
        takes its time per element, whatever the element's size."""
        if changes.cleared:
            self.wide.index_fill_(0, to_device(changes.cleared, torch.int64, self.data.device), 0)

    def poison(self, pages: torch.Tensor) -> None:
        """Set every bit of these pages, which makes NaN of every float type. Tests poison free pages, so that a kernel
        that wrongly reads them is found."""
        self.wide.index_fill_(0, pages, -1)

    @property
    def wide(self) -> torch.Tensor:
        """View the pages as wide integers."""
        return self.data.view(torch.int64 if self.layout.page_bytes % 8 == 0 else torch.int8)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()
