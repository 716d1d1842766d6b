from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.config import EngineConfig
from outrider.core.request_keeper import RequestKeeper
from outrider.engine.engine_features import EngineFeatures
from outrider.runner.commands import done_errand


def test_an_interrupt_while_a_feature_is_made_leaves_no_keeper() -> None:
    """The worker's half is made in this process, so Ctrl-C may come meanwhile. The next request makes the feature."""
    begun: list[str] = []

    def begin(command: Any) -> Future[None]:
        begun.append(command.name)
        if len(begun) == 1:
            raise KeyboardInterrupt
        return done_errand()

    tools: Any = SimpleNamespace(begin=begin)
    features = EngineFeatures(EngineConfig("model"), [], tools)
    made: list[Any] = [SimpleNamespace(make_keeper=partial(_keep, RequestKeeper())) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        features.put("grammars", made[0])
    assert features.keepers.find(RequestKeeper) is None
    features.put("grammars", made[1])
    assert features.keepers.find(RequestKeeper) is made[1].make_keeper(tools) and features.need("grammars") is made[1]
    assert begun == ["grammars", "grammars"]


def _keep(keeper: RequestKeeper, tools: Any) -> RequestKeeper:
    return keeper
