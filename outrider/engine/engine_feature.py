"""EngineFeature: what a feature adds to an engine, which holds requests. No torch."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from outrider.core.params import SamplingParams
from outrider.core.request_keeper import RequestKeeper
from outrider.runner.commands import Answer, Command
from outrider.runner.interface import WorkerInfo
from outrider.sched.row_resources import RowResource


class Order(Protocol):
    """A function that gives a command to the worker and does not wait for the answer."""

    def __call__(self, command: Command[Answer], /) -> Future[Answer]: ...


class EngineFeature:
    """The part of a feature that runs in the engine. A subclass overrides the methods that it needs; by default a
    method does nothing."""

    reads_extra_args = False  # whether requests pass it values in `SamplingParams.extra_args`

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters of a request that the feature cannot serve. Called before it is accepted."""

    def make_resource(self, info: WorkerInfo) -> RowResource | None:
        """Make the resource that requests of the feature need on the device to run. Every new scheduler gets a new
        resource, of which nothing is taken."""
        return None

    def make_keeper(self, info: WorkerInfo, order: Order) -> RequestKeeper | None:
        """Make the object that keeps the feature's data for requests. Called once."""
        return None

    def page_labels(self) -> dict[str, str]:
        """Public names of cache keys (`RequestPart.cache_key`), for events of the cache. The feature changes it."""
        return {}
