"""The target's hidden states of texts, kept so that the target computes each text once and not in every epoch.

States are kept on the device up to a share of its free memory, then in the host's memory up to a share of that. Texts
for which neither has room are computed again whenever they are needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from outrider.core.host_memory import available_bytes

DEVICE_SHARE = 0.5  # of a GPU's free memory; training needs the rest
HOST_SHARE = 0.5  # of the host's available memory
SEGMENT_BYTES = 1 << 30  # states that are allocated and computed together
REPORT_SECONDS = 5.0
GIB = 1 << 30

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class TextStates:
    """The target's hidden states and likeliest tokens of one text."""

    states: torch.Tensor  # [tokens, auxiliary states and final state], on the device or in pinned memory of the host
    best: torch.Tensor  # [tokens] int64 on the host: the likeliest next token; 0 before the answer and at the end


@dataclass
class StateRoom:
    """The free memory for kept hidden states, in bytes, on the device and on the host."""

    on_device: int
    on_host: int  # beside a GPU; 0 where the device is the host itself

    @classmethod
    def measure(cls, device: torch.device) -> StateRoom:
        host = int(HOST_SHARE * available_bytes())
        if device.type != "cuda":
            return cls(host, 0)
        return cls(int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]), host)

    def take_on_device(self, num_bytes: int) -> bool:
        """Reserve memory on the device for one text. Returns False if there is not enough."""
        has_room = num_bytes <= self.on_device
        self.on_device -= num_bytes if has_room else 0
        return has_room

    def take_on_host(self, num_bytes: int) -> bool:
        has_room = num_bytes <= self.on_host
        self.on_host -= num_bytes if has_room else 0
        return has_room


class KeepProgress:
    """Reports how many tokens' states are kept, every few seconds and at the end."""

    def __init__(self, num_tokens: int, room: StateRoom, report: Callable[[str], None]) -> None:
        """num_tokens: the number of tokens of all texts. room: the free memory before any states are kept."""
        self._num_tokens, self._before, self._report = num_tokens, replace(room), report
        self._num_kept = 0
        self._began = self._last_told = time.perf_counter()

    def add(self, num_tokens: int) -> None:
        self._num_kept += num_tokens
        now = time.perf_counter()
        if now - self._last_told >= REPORT_SECONDS:
            self._report(f"target's states of {self._num_kept} of {self._num_tokens} tokens "
                         f"({self._num_kept / (now - self._began):.0f} tokens/s)")
            self._last_told = now

    def end(self, room: StateRoom) -> None:
        """Report the tokens whose states were kept. room: the memory that is left."""
        before, seconds = self._before, max(time.perf_counter() - self._began, 1e-9)
        places = f"{(before.on_device - room.on_device) / GIB:.2f} GiB on the device"
        if before.on_host != room.on_host:
            places += f" and {(before.on_host - room.on_host) / GIB:.2f} GiB in the host's memory"
        rest = "" if self._num_kept == self._num_tokens else "; the others are computed whenever they are trained on"
        self._report(f"keeps the target's states of {self._num_kept} of {self._num_tokens} tokens, computed in "
                     f"{seconds:.1f} s ({self._num_kept / seconds:.0f} tokens/s): {places}{rest}")


def segments(answer_from: Mapping[Tokens, int], max_tokens: int, max_texts: int) -> Iterator[dict[Tokens, int]]:
    """Group texts, in their order, so that a group has at most `max_tokens` tokens and `max_texts` texts; a longer text
    is a group by itself. Groups depend on the texts alone, so that a resumed run computes the same ones. answer_from:
    the texts, and where the answer begins in each."""
    group: dict[Tokens, int] = {}
    total = 0
    for tokens, start in answer_from.items():
        if group and (total + len(tokens) > max_tokens or len(group) == max_texts):
            yield group
            group, total = {}, 0
        group[tokens] = start
        total += len(tokens)
    if group:
        yield group


def to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a GPU's tensor to pinned memory of the host, from which the GPU can read without making the host wait."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
