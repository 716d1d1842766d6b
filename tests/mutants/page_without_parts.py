"""A page is copied to the host without the parts that are kept once for each page."""

from __future__ import annotations

import torch

from outrider.mixers.pool import DevicePool

NAME = "page copied without its drafter's part"
TESTS = ["tests/unit/test_extending_cache.py::test_one_copy_moves_a_page_with_its_drafters_part"]


def apply() -> None:
    copy_page = DevicePool.copy_page

    def layers_alone(self: DevicePool, page: int) -> torch.Tensor:
        copied = copy_page(self, page)
        copied[min(placed.start for placed in self.layout.page_parts) :] = 0
        return copied

    DevicePool.copy_page = layers_alone  # type: ignore[method-assign]
