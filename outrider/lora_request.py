"""Types by which LLM, AsyncLLM and their callers name and load LoRA adapters. No torch.

LoRARequest names an adapter; its field names follow vLLM's. LoadedAdapter is the adapter with which a request runs.
AdapterLoads is the interface to the adapters of an engine."""

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
    """An adapter: its name, a number that the caller chooses, and its folder. `load_inplace`: read the folder again
    even if an adapter with this name and folder is loaded."""

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
    """The adapter with which a request runs: the number of its load, and the digest of its files, which is part of the
    keys of pages."""

    number: int  # of its load
    digest: str = ""  # of its files, once they have been read

    @property
    def cache_key(self) -> str:
        return f"adapter={self.digest or self.number}"


class UnreadableAdapter(ValueError):
    """Raised if an adapter cannot be read. `brief`: the message with the folder's name instead of its path. A server
    sends it to clients, which need not know where the files are."""

    def __init__(self, message: str, folder: str) -> None:
        super().__init__(message)
        path = Path(folder)
        self.brief = message.replace(str(path), path.name)


class AdaptersInUse(ValueError):
    """Raised if as many adapters are loaded as the settings allow (max_cpu_loras), and requests use all of them."""


class UnknownAdapter(ValueError):
    """Raised if no adapter has the given name."""


class AdapterHold:
    """Keeps an adapter loaded until its caller has added requests that use it. The hold ends with
    `AdapterLoads.release`, or when the object is garbage-collected, for example after an interrupt."""

    def __init__(self, number: int) -> None:
        self.number = number  # of the load


class AdapterLoads(RequestKeeper, ABC):
    """The interface to an engine's adapters, for LLM and AsyncLLM. Methods are called on the thread that calls
    `Engine.step`."""

    max_slots: int  # adapters on the device at once

    @property
    @abstractmethod
    def names(self) -> Mapping[str, str]:
        """Return the adapters that requests may ask for by name alone: their folders by name."""

    @abstractmethod
    def names_in_use(self) -> tuple[list[str], list[str]]:
        """Return the names of adapters that running requests use, and the names that only waiting requests use. May be
        called from any thread."""

    @abstractmethod
    def begin(self, asked: LoRARequest) -> AdapterHold:
        """Begin to load an adapter unless it is loaded. It stays loaded until `release`, or until the hold is
        garbage-collected."""

    @abstractmethod
    def hold(self, number: int) -> AdapterHold:
        """Keep an adapter loaded until requests that were checked with load `number` are added. The hold is for the
        same load if it still exists, otherwise for the load that has replaced it. If the adapter was evicted, its
        folder is loaded again."""

    @abstractmethod
    def is_loaded(self, number: int) -> bool:
        """Whether the caller's process already knows that an adapter was read. Unlike `is_ready`, this does not ask the
        worker."""

    @abstractmethod
    def is_ready(self, number: int) -> bool:
        """Whether an adapter has been read; asks the worker. If the adapter cannot be read, forgets the load and raises
        ValueError."""

    @abstractmethod
    def identity(self, number: int) -> tuple[str, str]:
        """Return the name of a loaded adapter, and the digest of its files."""

    @abstractmethod
    def release(self, hold: AdapterHold) -> None:
        """End a hold, because the front has added its requests or has given up."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Stop serving the adapter to new requests. Running requests keep it until they end."""


AdapterChoice: TypeAlias = "LoRARequest | None | Sequence[LoRARequest | None]"


def one_for_each(given: AdapterChoice, count: int) -> list[LoRARequest | None]:
    """Return a list with the adapter of each of `count` prompts. `given`: one adapter for all prompts, or a list."""
    each: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given] * count
    for one in each:
        if one is not None and not isinstance(one, LoRARequest):
            raise ValueError("lora_request must be a LoRARequest, or a list with one for each prompt, got "
                             f"{shown(one)}")
    if len(each) != count:
        raise ValueError(f"{len(each)} lora_requests for {count} prompts: give one, or one for each prompt")
    return each
