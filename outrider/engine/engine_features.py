"""EngineFeatures: the features of one engine. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from outrider.config import EngineConfig
from outrider.core.feature_parts import RequestPart
from outrider.core.hidden_params import RequestParams
from outrider.core.params import SamplingParams
from outrider.core.request_keeper import RequestKeepers
from outrider.engine.engine_feature import Caller, EngineFeature, EngineTools
from outrider.feature_list import asking_parameters, engine_half

Checked = TypeVar("Checked")
PartMaker = Callable[[], RequestPart]


class EngineFeatures:
    """The features that the settings ask for, and those that requests ask for by a parameter. A feature of the second
    kind is made when the first such request is checked. May be used by several threads."""

    def __init__(self, config: EngineConfig, of_settings: Sequence[EngineFeature], tools: EngineTools) -> None:
        self.of_settings = tuple(of_settings)
        self._config, self._tools = config, tools
        keepers = [feature.make_keeper(tools) for feature in of_settings]
        self.keepers = RequestKeepers([keeper for keeper in keepers if keeper is not None])
        self._lock = threading.RLock()  # a trace function may raise where `with` ends, before the release
        self._made: dict[str, EngineFeature] = {}  # by name

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError for parameters that a feature cannot serve."""
        if params.extra_args is not None and not any(feature.reads_extra_args for feature in self.of_settings):
            raise ValueError("extra_args are values for logits processors, and this engine has none: start it with "
                             "logits_processors")
        for feature in self._serving(params):
            feature.check_params(params)

    def part_makers(self, params: RequestParams, caller: Caller | None) -> list[PartMaker]:
        """Prepare what requests with these parameters need of features. Each maker makes one part of a request."""
        if not isinstance(params, SamplingParams):
            return []
        makers = [feature.part_maker(params, caller) for feature in self._serving(params)]
        return [maker for maker in makers if maker is not None]

    def start_check(self, check: Callable[[], Checked], params: RequestParams, tenant: str) -> Future[Checked] | None:
        """Start a check on a thread, if the parameters ask for a feature whose checks may take seconds."""
        for feature in self._serving(params) if isinstance(params, SamplingParams) else ():
            if (started := feature.start_check(check, tenant)) is not None:
                return started
        return None

    def need(self, name: str) -> EngineFeature:
        """The half of a feature that requests ask for. Raises ValueError if this installation lacks it."""
        with self._lock:
            if name not in self._made:
                self.put(name, engine_half(name)(self._config))
            return self._made[name]

    def put(self, name: str, feature: EngineFeature) -> None:
        """Add a feature that requests ask for. Its keeper comes first: an interrupt leaves no feature without it."""
        keeper = feature.make_keeper(self._tools)
        if keeper is not None:
            self.keepers.add(keeper)
        self._made[name] = feature

    def _serving(self, params: SamplingParams) -> list[EngineFeature]:
        asked = [name for parameter, name in asking_parameters() if getattr(params, parameter) is not None]
        return [*self.of_settings, *map(self.need, asked)]
