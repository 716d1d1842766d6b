"""EngineFeatures: holds the features of one engine, and calls them when requests are checked. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from outrider.config import EngineConfig
from outrider.core.feature_parts import RequestPart
from outrider.core.hidden_params import RequestParams
from outrider.core.params import SamplingParams
from outrider.core.request_keeper import RequestKeepers
from outrider.engine.engine_feature import Caller, EngineFeature, EngineTools
from outrider.feature_list import asking_parameters, early_features, engine_half, has_worker_half, implied_parameters
from outrider.runner.commands import MakeFeature, done_errand
from outrider.runner.interface import WorkerDied

Checked = TypeVar("Checked")
PartMaker = Callable[[], RequestPart]


class EngineFeatures:
    """The features of one engine: those that the settings ask for, and those that requests ask for by a parameter. A
    feature of the second kind is made when the first such request is checked, or at once if the settings configure it.
    May be used by several threads."""

    def __init__(self, config: EngineConfig, of_settings: Sequence[EngineFeature], tools: EngineTools) -> None:
        self.of_settings = tuple(of_settings)
        self._config, self._tools = config, tools
        self._asking = asking_parameters()
        keepers = [feature.make_keeper(tools) for feature in of_settings]
        self.keepers = RequestKeepers([keeper for keeper in keepers if keeper is not None])
        self._lock = threading.RLock()  # a trace function may raise where `with` ends, before the release
        self._made: dict[str, EngineFeature] = {}  # by name
        self._in_worker: dict[str, Future[None]] = {}  # by name: done when the worker has its half
        for name in early_features(config):
            self.need(name)

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters that a feature cannot serve. Parameters that the settings imply are set."""
        for parameter in implied_parameters(self._config, params):
            setattr(params, parameter, True)
        serving = self._serving(params)
        if params.extra_args is not None and not any(feature.reads_extra_args for feature in serving):
            raise ValueError("extra_args are values for logits processors, and this engine has none: leave extra_args "
                             "out, or start the engine with logits_processors")
        for feature in serving:
            feature.check_params(params)

    def part_makers(self, params: RequestParams, caller: Caller | None) -> list[PartMaker]:
        """Prepare features for requests with these parameters. Returns functions, each of which makes one feature's
        part of such a request."""
        if not isinstance(params, SamplingParams):
            return []
        for name in self._asked(params):
            self.need(name)
            with suppress(WorkerDied):  # the engine says so where the request is read
                self._in_worker[name].result()
        makers = [feature.part_maker(params, caller) for feature in self._serving(params)]
        return [maker for maker in makers if maker is not None]

    def start_check(self, check: Callable[[], Checked], params: RequestParams, tenant: str) -> Future[Checked] | None:
        """Start a check on another thread, if the parameters ask for a feature whose checks may take seconds; otherwise
        return None."""
        for feature in self._serving(params) if isinstance(params, SamplingParams) else ():
            if (started := feature.start_check(check, tenant)) is not None:
                return started
        return None

    def need(self, name: str) -> EngineFeature:
        """Return the engine's part of a feature that requests ask for by a parameter; the first call makes it. Raises
        ValueError if this installation lacks the feature."""
        with self._lock:
            if name not in self._made:
                self.put(name, engine_half(name)(self._config))
            return self._made[name]

    def put(self, name: str, feature: EngineFeature) -> None:
        """Add the engine's part of a feature that requests ask for, and have the worker make its part. The feature is
        registered last, so that an interrupt leaves no half-made feature behind."""
        keeper = feature.make_keeper(self._tools)
        if name not in self._in_worker:
            self._in_worker[name] = self._tools.begin(MakeFeature(name)) if has_worker_half(name) else done_errand()
        if keeper is not None:
            self.keepers.add(keeper)
        self._made[name] = feature

    def _serving(self, params: SamplingParams) -> list[EngineFeature]:
        return [*self.of_settings, *map(self.need, self._asked(params))]

    def _asked(self, params: SamplingParams) -> list[str]:
        return [name for parameter, name in self._asking  # a number asks also if it is 0
                if (value := getattr(params, parameter)) is not None and value is not False]
