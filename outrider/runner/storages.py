"""Frees the memory behind tensors and restores it later, while the tensor objects and all their views stay.

On a GPU the storage of a tensor is resized to nothing and back, which moves it. On a CPU the pages of its memory are
given back to the system and come again as zeros when they are next touched: no address changes, so native code that
holds one still finds its data.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import weakref
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

MADV_DONTNEED = 4  # on Linux: private memory is freed at once, and reads as zeros from then on
PIECE_BYTES = 64 << 20  # of a copy in pinned memory; torch rounds other sizes up to a power of two
_LEAVES = (str, bytes, int, float, type, ModuleType, FunctionType, BuiltinFunctionType, weakref.ref)


def find_storages(roots: Iterable[Any], *, outlined: bool = False) -> dict[int, torch.UntypedStorage]:
    """Find the storages of all tensors that the objects hold, directly or through other objects. A storage's key stays
    the same when the storage is resized. Functions, classes and weak references are not followed. Tensors in a
    library's private layout have no storage and are left out. outlined: include tensors on the meta device, which have
    a size and no memory."""
    seen: dict[int, Any] = {}  # keeps the objects alive, so that an id has one owner
    found: dict[int, torch.UntypedStorage] = {}
    waiting = list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _LEAVES):
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            if (outlined or not item.is_meta) and item.layout is torch.strided:
                storage = item.untyped_storage()
                found[storage._cdata] = storage
        else:
            waiting += _held_by(item)
    return found


def _held_by(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, MethodType):
        return [item.__self__]
    slots = [name for kind in type(item).__mro__ for name in _slots(kind)]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in slots)]


def _slots(kind: type) -> tuple[str, ...]:
    names = kind.__dict__.get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


class FreedMemory:
    """Storages whose memory can be freed and restored. If `keeps` is set, the content is restored too: storages on a
    device are copied to the host, and storages in host memory are not freed."""

    def __init__(self, storages: Iterable[torch.UntypedStorage], *, keeps: bool) -> None:
        """Copy the content that is kept. Nothing is freed yet, so an error here changes nothing."""
        self._sizes = [(storage, storage.nbytes()) for storage in storages]
        self.total_bytes = sum(size for _, size in self._sizes)
        self.host_bytes = 0
        self._keeps = keeps
        self._copies: list[list[torch.Tensor]] = []
        for storage, _ in self._sizes if keeps else ():
            pieces = [_to_host(piece) for piece in _pieces(storage)] if _can_move(storage) else []
            self._copies.append(pieces)
            self.host_bytes += sum(piece.nbytes for piece in pieces)

    def free(self) -> int:
        """Free the memory of all storages. Returns the number of bytes that the device gets back."""
        return sum(self._free(storage, size) for storage, size in self._sizes)

    def _free(self, storage: torch.UntypedStorage, size: int) -> int:
        if _can_move(storage):
            storage.resize_(0)
            return size
        return 0 if self._keeps else _give_back(storage)

    def drop_content(self) -> int:
        """Drop the kept content, so that the memory must be filled again after `restore`. Returns the number of bytes
        that this frees on the device."""
        if not self._keeps:
            return 0
        self._keeps, self._copies = False, []
        return sum(_give_back(storage) for storage, _ in self._sizes if not _can_move(storage))

    def restore(self) -> None:
        """Restore the memory of the storages, with their content if it was kept, and as zeros otherwise. The copies are
        kept, because the memory may be freed again."""
        for index, (storage, size) in enumerate(self._sizes):
            if not _can_move(storage):
                continue
            storage.resize_(size)
            pieces = _pieces(storage)
            for piece, copy in zip(pieces, self._copies[index], strict=True) if self._keeps else ():
                piece.copy_(copy, non_blocking=True)
            for piece in () if self._keeps else pieces:
                piece.zero_()
        if any(self._copies) and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the copies may be forgotten from now on


def release_copies() -> None:
    """Give the pinned memory of copies that are no longer needed back to the system."""
    empty = getattr(torch._C, "_host_emptyCache", None)  # a torch without CUDA has none
    if empty is not None:
        empty()


def _can_move(storage: torch.UntypedStorage) -> bool:
    """Whether the storage may get another address when it is restored. On a CPU it may not, because native code holds
    addresses."""
    return storage.device.type != "cpu"


def _pieces(storage: torch.UntypedStorage) -> tuple[torch.Tensor, ...]:
    """Return the bytes of a storage in pieces, in order."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.split(PIECE_BYTES)


def _to_host(piece: torch.Tensor) -> torch.Tensor:
    return torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True).copy_(piece)


@functools.cache
def _madvise() -> Any:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _give_back(storage: torch.UntypedStorage) -> int:
    """Zero a CPU storage and give its whole pages back to the system. Returns the number of bytes in these pages."""
    start, size = storage.data_ptr(), storage.nbytes()
    data = torch.empty(0, dtype=torch.uint8).set_(storage)
    first = -start % mmap.PAGESIZE
    length = (size - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform != "linux" or length <= 0 or _madvise()(start + first, length, MADV_DONTNEED) != 0:
        data.zero_()
        return 0
    data[:first].zero_()
    data[first + length :].zero_()
    return length
