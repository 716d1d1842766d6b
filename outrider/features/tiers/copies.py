"""Copies pages between the device and host buffers: directly on a CPU, on separate streams on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.core.page_moves import MOST_STORE_BYTES
from outrider.features.tiers.loader import StagedPage
from outrider.kernels.buffers import to_device
from outrider.mixers.pool import DevicePool

Store = Callable[[memoryview], None]  # takes the bytes of a page


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor in host memory."""
    return memoryview(tensor.view(torch.uint8).numpy())


class PageCopies(ABC):
    """Copies pages between the device and the host. All methods but `make_buffer` are called by the thread that
    queues steps, before it queues the work of a step."""

    keeps_buffers = False  # whether the bytes that stores get stay as they are, so that a thread may copy them later

    @abstractmethod
    def make_buffer(self, num_bytes: int) -> memoryview:
        """Make a host buffer that `fill` can copy to a page. Any thread may call this."""

    @abstractmethod
    def store(self, pages: Sequence[tuple[int, Store]]) -> None:
        """Copy pages to the host with their content before this step. The function of each page is called when the
        page's bytes have been copied, now or in a later `settle`."""

    @abstractmethod
    def fill(self, staged: Sequence[StagedPage]) -> None:
        """Copy host buffers to their pages on the device."""

    def join(self) -> None:
        """Make this step's work wait for all copies to the device: pages of cancelled copies are free, and it may use
        them."""

    @abstractmethod
    def settle(self, *, waits: bool = False) -> list[StagedPage]:
        """Finish the copies that have ended, and return the pages that they filled. Later steps may read these pages.
        waits: wait for all copies."""


class HostCopies(PageCopies):
    """PageCopies on a CPU, whose pages lie in host memory: every copy is done at once."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._filled: list[StagedPage] = []

    def make_buffer(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def store(self, pages: Sequence[tuple[int, Store]]) -> None:
        for page, store in pages:
            store(buffer_of(self._pool.data[page]))

    def fill(self, staged: Sequence[StagedPage]) -> None:
        for each in staged:
            if each.place is not None:
                page = self._pool.data[each.page].view(torch.uint8).numpy()
                page[:] = np.frombuffer(each.data, dtype=np.uint8)  # other threads run meanwhile, unlike with buffers
        self._filled += staged

    def settle(self, *, waits: bool = False) -> list[StagedPage]:
        filled, self._filled = self._filled, []
        return filled


class Scratch:
    """Memory of the device for pages that are on their way to the host, and the event after the last such copy."""

    def __init__(self, pool: DevicePool) -> None:
        num_pages = max(1, MOST_STORE_BYTES // pool.layout.page_bytes)
        self.pages = torch.empty(num_pages, pool.wide.shape[1], dtype=pool.wide.dtype, device=pool.data.device)
        self.ended = torch.cuda.Event()

    def gather(self, pool: DevicePool, pages: Sequence[int]) -> torch.Tensor:
        """Copy pages to this memory, once it is free, and return the copies."""
        torch.cuda.current_stream().wait_event(self.ended)
        copies = self.pages[:len(pages)]
        torch.index_select(pool.wide, 0, to_device(pages, torch.int64, self.pages.device), out=copies)
        return copies


@dataclass(slots=True)
class Queued:
    """Copies that were queued together, and the CUDA event recorded after them."""

    ended: torch.cuda.Event
    stores: list[tuple[memoryview, Store]]
    filled: list[StagedPage]


class StreamCopies(PageCopies):
    """PageCopies on a GPU, between pages and pinned host memory, with one stream for each direction. The host never
    waits for them.

    Before the step's own work, which may overwrite the pages, its stream copies them to a scratch on the device. The
    slower copy to the host runs beside the step. Filled pages are given to requests only after the copy's event, so no
    step waits for loads. Buffers live until that event."""

    keeps_buffers = True

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._to_host, self._to_device = torch.cuda.Stream(), torch.cuda.Stream()
        self._queued: deque[Queued] = deque()
        self._misses: list[StagedPage] = []
        self._scratches = deque([Scratch(pool), Scratch(pool)])

    def make_buffer(self, num_bytes: int) -> memoryview:
        return buffer_of(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))

    def store(self, pages: Sequence[tuple[int, Store]]) -> None:
        most = len(self._scratches[0].pages)
        for first in range(0, len(pages), most):
            self._store(pages[first:first + most])

    def _store(self, pages: Sequence[tuple[int, Store]]) -> None:
        """Copy at most as many pages as a scratch holds."""
        scratch, page_bytes = self._scratches[0], self._pool.layout.page_bytes
        self._scratches.rotate()
        copies = scratch.gather(self._pool, [page for page, _ in pages])
        self._to_host.wait_stream(torch.cuda.current_stream())
        # All buffers have one size, so that torch finds the last ones again: to pin memory takes long.
        buffer = torch.empty(len(scratch.pages) * page_bytes, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._to_host):
            buffer[:copies.nbytes].copy_(copies.view(torch.uint8).view(-1), non_blocking=True)
            scratch.ended.record()
        data = buffer_of(buffer)
        stores = [(data[index * page_bytes:(index + 1) * page_bytes], store) for index, (_, store) in enumerate(pages)]
        self._queue(self._to_host, Queued(torch.cuda.Event(), stores, []))

    def fill(self, staged: Sequence[StagedPage]) -> None:
        found = [each for each in staged if each.place is not None]
        self._misses += [each for each in staged if each.place is None]
        if not found:
            return
        self._to_device.wait_stream(torch.cuda.current_stream())  # steps of the pages' last holders
        with torch.cuda.stream(self._to_device):
            for each in found:
                source = torch.frombuffer(each.data, dtype=torch.uint8)
                self._pool.data[each.page].view(torch.uint8).copy_(source, non_blocking=True)
        self._queue(self._to_device, Queued(torch.cuda.Event(), [], found))

    def settle(self, *, waits: bool = False) -> list[StagedPage]:
        filled, self._misses = self._misses, []
        for queued in list(self._queued):
            if waits:
                queued.ended.synchronize()
            elif not queued.ended.query():
                continue
            self._queued.remove(queued)
            for data, store in queued.stores:
                store(data)
            filled += queued.filled
        if filled:  # what a step reads from now on was written by the other stream
            torch.cuda.current_stream().wait_stream(self._to_device)
        return filled

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._to_device)

    def _queue(self, stream: torch.cuda.Stream, queued: Queued) -> None:
        queued.ended.record(stream)
        self._queued.append(queued)
