"""Streams: the residual streams of one forward of a bridged model.

transformers' own loop calls its decoder layers, so hooks at the layers record the streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Streams:
    """The recorded streams. Stream i is the residual stream after the first i layers."""

    def __init__(self) -> None:
        self._wanted: set[int] = set()
        self._found: dict[int, torch.Tensor] = {}

    def watch(self, layers: nn.ModuleList) -> None:
        layers[0].register_forward_pre_hook(self._before, with_kwargs=True)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(self._after(index + 1))

    @contextmanager
    def kept(self, wanted: set[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Context manager that records the wanted streams. It yields a dict from the stream's number to [tokens,
        hidden]."""
        self._wanted, self._found = wanted, {}
        try:
            yield self._found
        finally:
            self._wanted, self._found = set(), {}

    def keep(self, number: int, stream: torch.Tensor) -> None:
        if number in self._wanted:
            self._found[number] = stream[0]

    def _before(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.keep(0, stream_of(args, options))

    def _after(self, number: int) -> Any:
        def after(_: nn.Module, args: tuple[Any, ...], made: Any) -> None:
            self.keep(number, made[0] if isinstance(made, tuple) else made)

        return after


def stream_of(args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """Return the residual stream among the arguments of a decoder layer."""
    stream: torch.Tensor = args[0] if args else options["hidden_states"]
    return stream


class PassingModule(nn.Module):
    """A decoder layer that changes nothing. It replaces layers whose kernels an earlier layer has compiled already."""

    def __init__(self, layer: nn.Module, number: int, streams: Streams, *, makes_tuple: bool) -> None:
        super().__init__()
        self.__dict__["_plain"] = layer  # not a module of this one, so that its own attributes stay readable
        self._number, self._streams, self._makes_tuple = number, streams, makes_tuple

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_plain"], name)  # loops over layers ask them for their kind

    def forward(self, *args: Any, **options: Any) -> Any:
        stream = stream_of(args, options)
        self._streams.keep(self._number, stream)
        return (stream,) if self._makes_tuple else stream
