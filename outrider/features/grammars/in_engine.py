"""GrammarsInEngine: the engine's part of structured outputs. It has grammars compiled, and leases them to requests. No
torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from outrider.config import EngineConfig
from outrider.core.feature_parts import RequestPart
from outrider.core.params import SamplingParams
from outrider.core.request_keeper import RequestKeeper
from outrider.engine.engine_feature import Caller, EngineFeature, EngineTools
from outrider.features.grammars.compiler import GrammarCompiler

Checked = TypeVar("Checked")


class GrammarsInEngine(EngineFeature):
    def __init__(self, config: EngineConfig) -> None:
        self._compiler: GrammarCompiler | None = None  # None: there is no tokenizer

    @property
    def compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            raise ValueError("structured_outputs need a tokenizer, and this engine has none: use a model folder with "
                             "tokenizer files, without skip_tokenizer_init")
        return self._compiler

    def part_maker(self, params: SamplingParams, caller: Caller | None) -> Callable[[], RequestPart] | None:
        asked = params.structured_outputs
        if asked is None:
            return None
        # The maker's lease keeps the form until each request has its own.
        return partial(self.compiler.leases.again, self.compiler.check(asked, caller))

    def start_check(self, check: Callable[[], Checked], tenant: str) -> Future[Checked] | None:
        return None if self._compiler is None else self._compiler.start_check(check, tenant)

    def make_keeper(self, tools: EngineTools) -> RequestKeeper | None:
        if tools.model.tokenizer is not None:
            self._compiler = GrammarCompiler(tools.model.need_tokenizer, tools.model.eos_ids, tools.begin)
        return None if self._compiler is None else self._compiler.leases
