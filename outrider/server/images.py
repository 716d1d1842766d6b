"""RequestImages: the images of a server's requests. It refuses those that cannot be served, decodes the others in
threads, and bounds the memory of each tenant's decoded images.

Decoded images are held until the engine has checked their request and taken the data that it needs. Image files are
decoded by `features/images`, which is imported when the first image comes."""

from __future__ import annotations

import asyncio
import warnings
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.engine.served_model import ServedModel
from outrider.feature_list import feature_object
from outrider.server.errors import ApiError
from outrider.server.fair_threads import FairThreads
from outrider.server.protocol import ChatMessage, ImagePart
from outrider.server.settings import ServerConfig
from outrider.server.templating import images_of, with_images_of_tools

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DECODERS = 2  # threads; a tenant without an image in one of them gets another
READERS = 16  # requests of one tenant whose image files are in memory at once
FEATURE = "outrider.features.images"
Made = TypeVar("Made")


@dataclass(frozen=True)
class ImagePrompt:
    """Token ids with a placeholder for each image, and the images in their order."""

    token_ids: list[int]
    images: Sequence[NDArray[np.uint8]]  # each [height, width, 3]
    details: Sequence[str | None]

    def as_dict(self) -> dict[str, Any]:
        details = [detail or "auto" for detail in self.details] if any(self.details) else None
        return {"prompt_token_ids": self.token_ids, "multi_modal_data": {"image": list(self.images)},
                "mm_processor_kwargs": None if details is None else {"detail": details}}


@dataclass(frozen=True)
class DecodedImages:
    """The images of one conversation, or none: then the prompt consists of token ids alone."""

    images: Sequence[NDArray[np.uint8]] = ()
    details: Sequence[str | None] = ()

    def in_prompt(self, token_ids: list[int]) -> list[int] | ImagePrompt:
        return ImagePrompt(token_ids, self.images, self.details) if self.images else token_ids


def image_parts(messages: Sequence[ChatMessage]) -> list[ImagePart]:
    """Return all images of the messages, in the order in which a chat template writes them."""
    return [part for message in with_images_of_tools(messages) for part in images_of(message)]


def has_images(messages: Sequence[ChatMessage]) -> bool:
    return any(images_of(message) for message in messages)


def forget_images(messages: Sequence[ChatMessage]) -> None:
    """Drop the data of images that the engine has already. Otherwise the messages would keep the data until the answer
    is complete."""
    for message in messages:
        for part in images_of(message):
            part.image_url.url = ""


class RequestImages:
    """The images of the requests of one event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._readers = TenantBudget(READERS)

    @property
    def is_idle(self) -> bool:
        """Whether no request holds an image."""
        return self._readers.total_held == self._budget.total_held == 0

    def check(self, messages: Sequence[ChatMessage], model: ServedModel, *, takes_images: bool, is_cut: bool) -> None:
        """Refuse images that this model, or this route, does not accept. is_cut: whether the prompt may be
        truncated."""
        if not has_images(messages):
            return
        if not model.takes_images:
            raise ApiError(400, f"{model.name} sees no images here: send texts alone, or use a server of a model that "
                                "sees images", param="messages")
        if not takes_images:
            raise ApiError(400, "this route takes no images: send texts alone", param="messages")
        if is_cut:
            raise ApiError(400, "truncate_prompt_tokens could cut an image in two: leave it out, or send no images",
                           param="truncate_prompt_tokens")

    @asynccontextmanager
    async def decoded(self, messages: Sequence[ChatMessage],
                      tenant: str | None) -> AsyncGenerator[DecodedImages, None]:
        """Context manager: decodes the images of a conversation. They count towards the tenant's memory while the block
        runs."""
        if not has_images(messages):
            yield DecodedImages()
            return
        async with self._readers.holding(tenant, 1):
            parts = image_parts(messages)
            try:
                files = await self._read(parts)
                num_pixels = await self._count_pixels(files)
            except ValueError as error:
                raise ApiError(400, str(error), param="messages") from None
            async with self._budget.holding(tenant, num_pixels):
                yield DecodedImages(await self._decode(files), [part.image_url.detail for part in parts])

    async def _count_pixels(self, files: Sequence[bytes]) -> int:
        size_of = self._feature("decode:image_size")
        sizes = await self._in_thread(lambda: [size_of(data, self._limits) for data in files])
        num_pixels = sum(width * height for width, height in sizes)
        self._limits.check_total(num_pixels)
        return num_pixels

    async def _read(self, parts: Sequence[ImagePart]) -> list[bytes]:
        """Read the files of images, one after another."""
        files: list[bytes] = []
        for part in parts:
            files.append(await self._read_one(part.image_url.url))
            if sum(map(len, files)) > self._limits.max_request_bytes:
                raise ApiError(400, f"the images of this request have more than {self._limits.max_request_bytes} bytes "
                                    "together (twice image_max_bytes): send fewer or smaller ones", param="messages")
        return files

    async def _read_one(self, url: str) -> bytes:
        match url.partition(":")[0].lower():
            case "data":
                return await self._in_thread(partial(self._feature("fetch:read_data_url"), url,
                                                     self._limits.max_bytes))
            case "file":
                return await self._in_thread(partial(self._feature("fetch:read_file"), url, self._sources))
        data: bytes = await self._feature("fetch:fetch")(url, self._sources)
        return data

    async def _decode(self, files: list[bytes]) -> list[NDArray[np.uint8]]:
        decode = self._feature("decode:decode")
        try:
            return [await self._in_thread(partial(decode, data, self._limits)) for data in files]
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None

    async def _in_thread(self, work: Callable[[], Made]) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @staticmethod
    def _feature(place: str) -> Any:
        return feature_object("images", f"{FEATURE}.{place}")

    @cached_property
    def _threads(self) -> FairThreads:
        # PIL describes damaged files in warnings. Each new text would be a line of the log, and kept for ever.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        return FairThreads(DECODERS)

    @cached_property
    def _limits(self) -> Any:
        return self._feature("limits:ImageLimits")(self._config.image_max_pixels, self._config.image_max_bytes)

    @cached_property
    def _sources(self) -> Any:
        config = self._config
        return self._feature("fetch:MediaSources")(config.allowed_media_domains, config.allowed_local_media_path,
                                                   config.image_max_bytes)

    @cached_property
    def _budget(self) -> TenantBudget:
        return TenantBudget(self._limits.max_request_pixels)


class TenantBudget:
    """The amount of something, such as memory, that the requests of one tenant may hold at once. Requests beyond it
    wait in order."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str | None] = Counter()
        self._lines: dict[str | None, deque[tuple[int, asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def holding(self, tenant: str | None, amount: int) -> AsyncGenerator[None, None]:
        """Context manager: hold this amount, at most `most`, while the block runs."""
        await self._take(tenant, amount)
        try:
            yield
        finally:
            self._give_back(tenant, amount)

    @property
    def total_held(self) -> int:
        return self._held.total()

    async def _take(self, tenant: str | None, amount: int) -> None:
        if tenant not in self._lines and self._held[tenant] + amount <= self._most:
            self._held[tenant] += amount
            return
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append((amount, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it got its turn just before
                self._give_back(tenant, amount)
            else:
                self._admit(tenant)
            raise

    def _give_back(self, tenant: str | None, amount: int) -> None:
        self._held[tenant] -= amount
        self._admit(tenant)
        if not self._held[tenant]:
            del self._held[tenant]

    def _admit(self, tenant: str | None) -> None:
        """Admit waiting requests of the tenant in order, as long as there is room."""
        line = self._lines.get(tenant, deque())
        while line:
            amount, turn = line[0]
            if not turn.done():
                if self._held[tenant] + amount > self._most:
                    return
                self._held[tenant] += amount
                turn.set_result(None)
            line.popleft()
        self._lines.pop(tenant, None)
