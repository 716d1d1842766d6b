"""EngineFeature: the part of a feature that runs in the engine, where requests are checked and held. No torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from outrider.cache.manager import CacheManager
from outrider.core.feature_parts import RequestPart
from outrider.core.params import SamplingParams
from outrider.core.request_keeper import RequestKeeper
from outrider.engine.served_model import ServedModel
from outrider.runner.commands import Answer, Command, Errand
from outrider.runner.interface import WorkerInfo
from outrider.sched.row_resources import RowResource

Checked = TypeVar("Checked")


class Order(Protocol):
    """A function that sends a command to the worker without waiting, and returns a future of the answer."""

    def __call__(self, command: Command[Answer], /) -> Future[Answer]: ...


@dataclass(frozen=True)
class Caller:
    """The tenant on whose behalf a request is checked. A feature whose checks take long serves tenants in turn. Callers
    with the same name are one tenant."""

    name: str = ""
    is_gone: Callable[[], bool] = lambda: False  # whether the answer is no longer waited for


@dataclass(frozen=True)
class EngineTools:
    """The objects of an engine that its features may use."""

    info: WorkerInfo
    model: ServedModel
    order: Order  # called on the thread that calls `Engine.step`
    begin: Callable[[Errand], Future[None]]  # gives the worker an errand; called on any thread


class EngineFeature:
    """The part of a feature that runs in the engine. A subclass overrides the methods that it needs; by default a
    method does nothing. Checks run on any thread."""

    reads_extra_args = False  # whether requests pass it values in `SamplingParams.extra_args`

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters that the feature cannot serve. Called before a request is accepted."""

    def part_maker(self, params: SamplingParams, caller: Caller | None) -> Callable[[], RequestPart] | None:
        """Prepare the feature for requests with these parameters, which may take seconds. Returns a function that makes
        the feature's part of one such request, or None if no part is needed. Raises ValueError for parameters that
        cannot be served. caller: None if the program itself asks."""
        return None

    def start_check(self, check: Callable[[], Checked], tenant: str) -> Future[Checked] | None:
        """Start a request's check on another thread, if the feature's checks may take seconds. If this returns None,
        the caller runs the check itself."""
        return None

    def make_resource(self, info: WorkerInfo) -> RowResource | None:
        """Make the device resource that requests of the feature must hold to run. Every new scheduler gets a new one,
        of which nothing is taken yet. A feature that is made for its first request has no resource."""
        return None

    def make_cache(self, plain: CacheManager) -> CacheManager:
        """Make the cache of a new scheduler. By default it is `plain`, whose pages lie on the device alone."""
        return plain

    def make_keeper(self, tools: EngineTools) -> RequestKeeper | None:
        """Make the object that keeps the feature's data for requests. Called once, before any request is checked."""
        return None

    def page_labels(self) -> dict[str, str]:
        """Return the names under which events of the cache show cache keys (`RequestPart.cache_key`). The feature
        changes this dict while it runs."""
        return {}
