"""LoRARequest: names the adapter of a request. Field names follow vLLM's. AdapterRead: a worker's answer about the
reading of one. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from outrider.core.fields import Count, Text, check_fields, shown

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
class AdapterRead:
    """A reading of an adapter that is over. Errors are data, since ranks read at their own pace, and a command that
    fails on some ranks alone would end all of them."""

    size: int = 0  # numbers that it takes on the device
    error: str | None = None  # what is wrong with the adapter


class UnreadableAdapter(ValueError):
    """An adapter that cannot be read. `brief`: the message without the place of the adapter's folder, for clients of a
    server, who need not know where its files lie."""

    def __init__(self, message: str, folder: str) -> None:
        super().__init__(message)
        path = Path(folder)
        self.brief = message.replace(str(path), path.name)


class AdaptersInUse(ValueError):
    """There is no room for a further adapter in the host's memory until requests end."""


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
