"""WeightReceiver: takes weights that a trainer sends to this server instead of writing files. No torch until a trainer
joins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, TypeVar

from pydantic import Field

from outrider.core.fields import shown
from outrider.models.sources.file_reads import DTYPES
from outrider.server.errors import ApiError
from outrider.server.protocol import Body

Made = TypeVar("Made")
NOT_ANNOUNCED = "this server takes no weights from trainers: start it with --weight-transfer-config"


class InitInfo(Body):
    """The address at which the trainer listens, and this server's rank among the processes."""

    master_address: Annotated[str, Field(min_length=1, max_length=255)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1)] = 1
    world_size: Annotated[int, Field(ge=2, le=4096)] = Field(
        default=2, description="the trainer's process and all servers, of which each has one rank: see /get_world_size")
    packed: bool | None = Field(default=None, description="is read, and makes no difference")


class InitTransferRequest(Body):
    init_info: InitInfo


@dataclass(frozen=True)
class Announced:
    """The weights that a trainer is about to send."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]

    @classmethod
    def from_fields(cls, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> Announced:
        if not len(names) == len(dtype_names) == len(shapes):
            raise ApiError(400, f"{len(names)} names, {len(dtype_names)} dtype_names and {len(shapes)} shapes: each "
                                "weight needs one of each", param="update_info")
        dtypes = [each.removeprefix("torch.") for each in dtype_names]
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            if dtype not in DTYPES.values() or any(size < 0 for size in shape):
                raise ApiError(400, f"{shown(name)} has dtype {shown(dtype)} and shape {shown(shape)}: give a dtype of "
                                    "torch and a list of sizes", param="update_info")
        return cls(names, dtypes, shapes)


class WeightReceiver:
    """The server's end of a connection to one trainer. A new trainer replaces an earlier one."""

    def __init__(self, settings: Mapping[str, Any] | None) -> None:
        """settings: `weight_transfer_config`; None: no trainer may join. Its `device` names the server's GPU for
        NCCL."""
        self._settings = settings
        self._group: Any = None  # a WeightGroup
        self._busy = asyncio.Lock()

    async def join(self, info: InitInfo) -> None:
        """Connect to a trainer that listens."""
        if self._settings is None:
            raise ApiError(403, NOT_ANNOUNCED)
        if info.rank_offset >= info.world_size:
            raise ApiError(400, f"rank_offset ({info.rank_offset}) must be below world_size ({info.world_size}): each "
                                "server has one rank behind the trainer's", param="init_info")
        async with self._busy:
            self._group = None
            self._group = await asyncio.to_thread(_joined, info, self._settings.get("device"))

    async def leave(self) -> None:
        """Close the connection, if there is one."""
        async with self._busy:
            self._group = None

    async def receive(self, announced: Announced, load: Callable[[Iterator[tuple[str, Any]]], Awaitable[Made]]) -> Made:
        """Pass the announced weights to `load` as they arrive. If `load` refuses one, the rest is still received,
        because the trainer sends it in any case."""
        if self._group is None:
            raise ApiError(400, "give the path of a file below --weights-root, or let the trainer join first with "
                                "/init_weight_transfer_engine", param="update_info")
        async with self._busy:
            incoming = _Incoming(self._group, announced)
            try:
                return await asyncio.shield(self._loaded(incoming, load))
            finally:
                if incoming.has_failed:
                    self._group = None  # the connection is of no more use

    async def _loaded(self, incoming: _Incoming, load: Callable[[Iterator[tuple[str, Any]]], Awaitable[Made]]) -> Made:
        try:
            return await load(iter(incoming))
        finally:
            await asyncio.to_thread(incoming.drop_rest)


class _Incoming:
    """Iterates over the announced weights. Each is received when the caller asks for it."""

    def __init__(self, group: Any, announced: Announced) -> None:
        self._group = group
        self._left = list(zip(announced.names, announced.dtypes, announced.shapes, strict=True))[::-1]
        self.has_failed = False

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        while self._left:
            name, dtype, shape = self._left.pop()
            try:
                tensor = self._group.receive(dtype, shape)
            except Exception as error:
                self.has_failed = True
                raise ValueError(f"{name} was not received: {error}") from None
            yield name, tensor

    def drop_rest(self) -> None:
        while self._left and not self.has_failed:
            for _ in self:
                pass


def _joined(info: InitInfo, device: str | None) -> Any:
    module = import_module("outrider.weight_group")
    try:
        return module.WeightGroup(info.master_address, info.master_port, info.rank_offset, info.world_size,
                                  device=device)
    except ConnectionError as error:
        raise ApiError(400, str(error), param="init_info") from None
