"""ServedAdapters: adapters that are served as models beside the base model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from outrider.async_llm import AsyncLLM
from outrider.lora_request import AdaptersInUse, LoRARequest, UnknownAdapter, UnreadableAdapter
from outrider.server.errors import ApiError, bad_value
from outrider.server.lora_modules import NamedAdapter, path_below, read_modules


class ServedAdapters:
    """The served adapters by name. They survive a restart of the engine."""

    def __init__(self, modules: Sequence[str], root: str | None, model_names: Sequence[str]) -> None:
        self._named, self._root, self._model_names = read_modules(modules), root, tuple(model_names)
        for name in self._named.keys() & set(model_names):
            raise ValueError(f"lora_modules: {name!r} is the name of the model: choose another")

    @property
    def names(self) -> list[str]:
        return list(self._named)

    def find(self, model: str | None) -> LoRARequest | None:
        """Find the adapter that a body names as its model."""
        adapter = self._named.get(model or "")
        return None if adapter is None else adapter.request

    def card(self, name: str) -> dict[str, str]:
        """The fields of /v1/models that only adapters have: the name of the adapter's folder, and its base model."""
        adapter = self._named.get(name)
        if adapter is None:
            return {}
        return {"root": Path(adapter.path).name, "parent": adapter.base or self._model_names[0]}

    async def load(self, llm: AsyncLLM, name: str, path: str, *, in_place: bool) -> None:
        """Load an adapter from a folder below the root folder, and serve it under a name."""
        if self._root is None:
            raise ApiError(403, "this server loads no adapters: start it with --lora-root")
        if name in self._model_names or (name in self._named and not in_place):
            raise ApiError(400, f"there is a model {name[:100]!r} already; choose another name, or set "
                                "load_inplace=true to replace an adapter", param="lora_name")
        try:
            own = NamedAdapter(name, path_below(self._root, path))
            await llm.add_lora(replace(own.request, load_inplace=True))
        except (AdaptersInUse, UnreadableAdapter) as error:
            raise bad_value(error, ("lora_path",)) from None
        except ValueError as error:
            raise ApiError(400, str(error), param="lora_path") from None
        self._named[name] = own

    async def unload(self, llm: AsyncLLM, name: str) -> None:
        if self._named.pop(name, None) is None:
            raise ApiError(404, f"this server has no adapter {name[:100]!r}: GET /v1/models lists those that it "
                                "has", param="lora_name")
        with suppress(UnknownAdapter):  # no request has asked for it yet
            await llm.remove_lora(name)
