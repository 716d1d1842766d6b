"""A feature from outside the package: requests name a factor, by which the outputs of some layers are multiplied.

It uses every contract of `outrider/feature_list.py`: a request's part, a keeper, a resource with two places, orders to
the device in the batch, and a part of every step that changes products row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.config import EngineConfig
from outrider.core import Admission, Limits, ScheduledBatch
from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import BatchPart, LimitsPart, RequestPart
from outrider.core.request_keeper import RequestKeeper
from outrider.drafters.base import Drafter
from outrider.engine.engine_feature import EngineFeature, EngineTools
from outrider.feature_list import FeatureEntry
from outrider.layers import DeltaSource, Linear, RowDeltas, find_modules
from outrider.models.base import Model
from outrider.runner.interface import WorkerInfo
from outrider.runner.memory import FeatureBytes
from outrider.runner.step import DeviceStep
from outrider.runner.worker_feature import WorkerFeature
from outrider.sched.row_resources import Room, RowResource

NUM_PLACES = 2


@dataclass(frozen=True)
class Scaled(RequestPart):
    factor: float

    @property
    def cache_key(self) -> str:
        return f"scaled={self.factor}"


@dataclass(frozen=True)
class Places(LimitsPart):
    count: int


@dataclass(frozen=True)
class PlacedFactors(BatchPart):
    """Factors that the device must have before the rows of the batch are admitted."""

    by_place: dict[int, float]


class FactorPlaces(RowResource):
    """A factor stays in its place as long as requests run with it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.users: dict[float, int] = {}
        self.most = 0  # factors that ran at once
        self._place_of: dict[float, int] = {}
        self._orders: dict[int, float] = {}

    def room_for(self, asked: CheckedRequest) -> Room:
        part = asked.part(Scaled)
        if part is None:
            return Room.NOT_NEEDED
        return Room.FREE if part.factor in self.users or len(self.users) < self._count else Room.TAKEN

    def take(self, asked: CheckedRequest) -> bool:
        if self.room_for(asked) is Room.TAKEN:
            return False
        factor = _factor_of(asked)
        if factor not in self.users:
            place = next(place for place in range(self._count) if place not in self._place_of.values())
            self._place_of[factor] = place
            self._orders[place] = factor
        self.users[factor] = self.users.get(factor, 0) + 1
        self.most = max(self.most, len(self.users))
        return True

    def give(self, asked: CheckedRequest) -> None:
        factor = _factor_of(asked)
        self.users[factor] -= 1
        if not self.users[factor]:
            del self.users[factor], self._place_of[factor]

    def forget_all(self) -> None:
        assert not self.users
        self._orders = {}

    def take_orders(self) -> PlacedFactors | None:
        orders, self._orders = self._orders, {}
        return PlacedFactors(orders) if orders else None

    def check_integrity(self) -> None:
        assert self.users.keys() == self._place_of.keys()
        assert len(set(self._place_of.values())) == len(self._place_of) <= self._count


class Counter(RequestKeeper):
    """How many requests of the feature the engine has."""

    def __init__(self) -> None:
        self.count = 0

    def enter(self, requests: Sequence[CheckedRequest]) -> None:
        if any(_factor_of(asked) <= 0 for asked in requests if asked.part(Scaled)):
            raise ValueError("a factor must be above 0")
        self.count += sum(asked.part(Scaled) is not None for asked in requests)

    def leave(self, asked: CheckedRequest) -> None:
        self.count -= asked.part(Scaled) is not None

    def forget_requests(self) -> None:
        self.count = 0


class ScaledInEngine(EngineFeature):
    def __init__(self, config: EngineConfig) -> None:
        self.places: FactorPlaces | None = None

    def make_resource(self, info: WorkerInfo) -> FactorPlaces:
        places = info.limits.part(Places)
        assert places is not None
        self.places = FactorPlaces(places.count)
        return self.places

    def make_keeper(self, tools: EngineTools) -> Counter:
        return Counter()


class ScaledRows(DeltaSource):
    def __init__(self, model: Model, limits: Limits) -> None:
        self._layers = {id(linear) for linear in scaled_layers(model)}
        self._place_of_row = torch.full((limits.max_requests + 1,), -1)
        self._factors = torch.ones(NUM_PLACES, dtype=torch.float64)
        self.is_closed = False

    def begin(self, batch: ScheduledBatch) -> None:
        orders = batch.part(PlacedFactors)
        for place, factor in ({} if orders is None else orders.by_place).items():
            self._factors[place] = factor

    def admit(self, admissions: Sequence[Admission]) -> None:
        for admission in admissions:
            part = admission.request.part(Scaled)
            found = -1 if part is None else self._factors.tolist().index(part.factor)
            self._place_of_row[admission.row] = found

    def reset(self) -> None:
        self._place_of_row.fill_(-1)
        self._factors.fill_(torch.nan)

    def close(self) -> None:
        self.is_closed = True

    def serves(self, rows: Sequence[int]) -> bool:
        return bool((self._place_of_row[list(rows)] >= 0).any())

    def of_step(self, rows: torch.Tensor, request_of: torch.Tensor) -> ScaledTokens:
        places = self._place_of_row[rows]
        factors = torch.where(places >= 0, self._factors[places.clamp_min(0)], 1.0)
        return ScaledTokens(self._layers, factors[request_of])


@dataclass(frozen=True)
class ScaledTokens(RowDeltas):
    layers: set[int]
    factors: torch.Tensor  # [tokens]

    def of_rows(self, token_rows: torch.Tensor) -> ScaledTokens:
        return replace(self, factors=self.factors[token_rows])

    def add_to(self, out: torch.Tensor, linear: Any, x: torch.Tensor, first: int) -> None:
        assert len(out) == len(self.factors), "the context is of other token rows"
        if id(linear) in self.layers:
            out += out * (self.factors - 1).to(out.dtype)[:, None]


class ScaledOnDevice(WorkerFeature):
    name = "scaled layers"

    def __init__(self, config: EngineConfig) -> None: ...

    def limit(self, limits: Limits, model: Model, drafter: Drafter | None) -> Limits:
        return replace(limits, parts=(*limits.parts, Places(NUM_PLACES)))

    def num_bytes(self, limits: Limits, model: Model) -> FeatureBytes:
        return FeatureBytes(buffers=8 * NUM_PLACES)

    def attach(self, step: DeviceStep, model: Model, limits: Limits) -> None:
        step.take_deltas(ScaledRows(model, limits))


ENTRY = FeatureEntry("scaled", ScaledOnDevice, ScaledInEngine)


def scaled_layers(model: Model) -> list[Linear]:
    """The layers that the feature changes: every second one."""
    return find_modules([model], Linear)[::2]


def _factor_of(asked: CheckedRequest) -> float:
    part = asked.part(Scaled)
    assert part is not None
    return part.factor
