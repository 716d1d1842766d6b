"""Adapters as callers and fronts know them: LoRARequest names one (field names follow vLLM's), LoadedAdapter is a
request's part, AdapterLoads what an engine with adapters can do. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from outrider.core.feature_parts import RequestPart
from outrider.core.fields import Count, Text, check_fields, shown
from outrider.core.request_keeper import RequestKeeper

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"  # the files of an adapter's folder


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name, a number of the caller's own, and its folder. `load_inplace`: read the folder again,
    although an adapter of this name and folder is loaded."""

    lora_name: Text
    lora_int_id: Count
    lora_path: Text
    load_inplace: bool = False

    def __post_init__(self) -> None:
        check_fields("LoRARequest: ", self)

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(frozen=True)
class LoadedAdapter(RequestPart):
    """The adapter of a request, as the engine knows it. An adapter that is read again has a new number."""

    number: int  # of its load

    @property
    def cache_key(self) -> str:
        return f"adapter={self.number}"


class UnreadableAdapter(ValueError):
    """An adapter that cannot be read. `brief`: the message without the place of the adapter's folder, for clients of a
    server, who need not know where its files lie."""

    def __init__(self, message: str, folder: str) -> None:
        super().__init__(message)
        path = Path(folder)
        self.brief = message.replace(str(path), path.name)


class AdaptersInUse(ValueError):
    """There is no room for a further adapter in the host's memory until requests end."""


class UnknownAdapter(ValueError):
    """No adapter has this name."""


class AdapterHold:
    """Keeps a load for a front that is about to add requests, or will add more: until `release`, or until the front
    has lost the hold, as after an interrupt or the end of a task."""

    def __init__(self, number: int) -> None:
        self.number = number  # of the load


class AdapterLoads(RequestKeeper, ABC):
    """The engine's adapters, as fronts see them. Called where `Engine.step` is."""

    max_slots: int  # adapters on the device at once

    @property
    @abstractmethod
    def names(self) -> Mapping[str, str]:
        """Folders of the adapters that can be asked for by name alone."""

    @abstractmethod
    def names_in_use(self) -> tuple[list[str], list[str]]:
        """Names of the adapters of running and waiting requests. May be called from any thread."""

    @abstractmethod
    def begin(self, asked: LoRARequest) -> AdapterHold:
        """Begin to load an adapter unless it is there. The load is kept as long as the hold, or until `release`."""

    @abstractmethod
    def hold(self, number: int) -> AdapterHold:
        """Keep the load for requests that were checked with this one and are about to be added: itself, the one that
        has replaced it since or, if it had to make room for others, a new reading of its folder."""

    @abstractmethod
    def is_loaded(self, number: int) -> bool:
        """Whether an adapter has been read, as far as is known here."""

    @abstractmethod
    def is_ready(self, number: int) -> bool:
        """Whether an adapter has been read. Raises ValueError, and forgets the load, if it cannot be."""

    @abstractmethod
    def identity(self, number: int) -> tuple[str, str]:
        """The name of an adapter that requests run with, and the digest of its files."""

    @abstractmethod
    def release(self, hold: AdapterHold) -> None:
        """A front has added its requests, or given up."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """From now on no new request may name the adapter. Running requests keep it until they end."""


AdapterChoice: TypeAlias = "LoRARequest | None | Sequence[LoRARequest | None]"


def one_for_each(given: AdapterChoice, count: int) -> list[LoRARequest | None]:
    """The adapter of each of `count` prompts: one for all of them, or a list with one for each."""
    each: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given] * count
    for one in each:
        if one is not None and not isinstance(one, LoRARequest):
            raise ValueError("lora_request must be a LoRARequest, or a list with one for each prompt, got "
                             f"{shown(one)}")
    if len(each) != count:
        raise ValueError(f"{len(each)} lora_requests for {count} prompts: give one, or as many")
    return each
