"""The attention backends by name: which device, dtype and cache type each serves, and the order in which `auto` prefers
them.

`register_backend` adds one from outside the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.cache.kinds import MODEL_CACHE, CacheType
from outrider.config import BACKENDS as SETTINGS
from outrider.core.lazy_exports import LateModule
from outrider.kernels import cpu as native
from outrider.kernels import ops
from outrider.mixers.paged.backend import Backend
from outrider.mixers.paged.codecs import FP8_NAMES
from outrider.mixers.paged.native_backend import NativeBackend

if TYPE_CHECKING:
    from outrider.mixers.paged import flex_backend, torch_backend, triton_backend
else:
    flex_backend = LateModule("outrider.mixers.paged.flex_backend")
    torch_backend = LateModule("outrider.mixers.paged.torch_backend")
    triton_backend = LateModule("outrider.mixers.paged.triton_backend")

ALIASES = {"cpu": "native"}
MASKED = ["flex", "torch"]  # backends that serve layers with masks, in the order in which `auto` prefers them


@dataclass(frozen=True)
class BackendEntry:
    """The entry of a backend in the table of backends."""

    name: str
    refusal: Callable[[torch.device, torch.dtype], str | None]  # why it does not serve them; None if it does
    make: Callable[[int], Backend]  # takes the most drafts of a request
    make_exact: Callable[[int], Backend] | None = None  # for exact mode; None: the backend is refused in it
    # How keys and values may be stored; by default only in the model's dtype.
    serves_type: Callable[[CacheType], bool] = lambda cache_type: cache_type == MODEL_CACHE

    def refusal_of(self, device: torch.device, dtype: torch.dtype, cache_type: CacheType) -> str | None:
        """Return the reason why the backend does not serve this combination of device, dtype and cache type; None if it
        does."""
        if not self.serves_type(cache_type):
            return "it cannot read keys and values of this type"
        return self.refusal(device, dtype)


_BACKENDS: dict[str, BackendEntry] = {}  # in the order in which `auto` prefers them


def register_backend(entry: BackendEntry, *, preferred: bool = False) -> None:
    """Make a backend available by name. `preferred`: whether `auto` tries it before all other backends, or after
    them."""
    others = {name: other for name, other in _BACKENDS.items() if name != entry.name}
    _BACKENDS.clear()
    _BACKENDS.update({entry.name: entry} | others if preferred else others | {entry.name: entry})
    if entry.name not in SETTINGS:
        SETTINGS.append(entry.name)


def make_backend(name: str, device: torch.device, dtype: torch.dtype, max_drafts: int = 0, *, exact: bool = False,
                 has_masks: bool = False, cache_type: CacheType = MODEL_CACHE) -> Backend:
    """Make the backend of that name; for "auto" the first backend that serves the dtype on the device. exact: a query's
    bits must not depend on the other queries. has_masks: some layers have masks. cache_type: how keys and values are
    stored."""
    if name != "auto" and ALIASES.get(name, name) not in _BACKENDS:
        raise ValueError(f"attention_backend={name!r} is not registered in the worker's process, which imports the "
                         "main module anew: call register_backend at the top level of that module")
    refusals: dict[str, str | None] = {}
    by_itself = MASKED if has_masks else [other for other in _BACKENDS if other != "flex"]
    for entry in [_BACKENDS[asked] for asked in (by_itself if name == "auto" else [ALIASES.get(name, name)])]:
        make = entry.make_exact if exact else entry.make
        refusals[entry.name] = "it is not exact" if make is None else entry.refusal_of(device, dtype, cache_type)
        if make is not None and refusals[entry.name] is None:
            return make(max_drafts)
    reasons = "; ".join(f"{tried}: {refusal}" for tried, refusal in refusals.items())
    mode = "exact=True: " if exact else ""
    asked, advice = f"{dtype} on {device.type}", "attention_backend='auto'"
    if cache_type != MODEL_CACHE:
        asked, advice = f"{asked} with kv_cache_dtype={cache_type.name!r}", f"{advice} or kv_cache_dtype='auto'"
    raise ValueError(f"{mode}attention_backend={name!r} does not serve {asked} ({reasons}): use {advice}")


def _refuses_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or dtype == torch.float64:
        return "its kernels are for CUDA and at most 32 bits"
    return None if ops.has_triton() else "the triton package is missing"


def _refuses_native(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu" or dtype != torch.float32:
        return "its kernels are for float32 on a CPU"
    return None if native.available() else native.reason()


def _refuses_flex(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cuda" and dtype == torch.float64:
        return "compiled FlexAttention has no float64"
    return None


register_backend(BackendEntry("triton", _refuses_triton,
                              lambda max_drafts: triton_backend.TritonBackend(decode_kernel_max_query=1 + max_drafts),
                              lambda max_drafts: triton_backend.ExactTritonBackend(1 + max_drafts),
                              serves_type=lambda cache_type: cache_type.name in (MODEL_CACHE.name, *FP8_NAMES)))
register_backend(BackendEntry("native", _refuses_native, lambda _: NativeBackend(), lambda _: NativeBackend()))
register_backend(BackendEntry("flex", _refuses_flex, lambda _: flex_backend.FlexBackend()))
register_backend(BackendEntry("torch", lambda device, dtype: None, lambda _: torch_backend.TorchBackend(),
                              serves_type=lambda cache_type: True))
