"""ReceiptsInEngine: the engine's part of receipts. It reads the key that signs them when it is made, and hashes the
model's files when the first request asks for a receipt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from outrider.config import EngineConfig
from outrider.core.feature_parts import RequestPart
from outrider.core.params import SamplingParams
from outrider.engine.engine_feature import Caller, EngineFeature, EngineTools
from outrider.engine.served_model import ServedModel
from outrider.features.receipts.receipt import read_key
from outrider.features.receipts.request import ReceiptPart
from outrider.features.receipts.writer import ReceiptWriter

Checked = TypeVar("Checked")


class ReceiptsInEngine(EngineFeature):
    def __init__(self, config: EngineConfig) -> None:
        self._key = None if config.receipt_key_file is None else read_key(config.receipt_key_file)
        self._model: ServedModel | None = None
        self._made: ReceiptWriter | None = None
        self._lock = threading.RLock()

    def make_keeper(self, tools: EngineTools) -> None:
        self._model = tools.model

    def check_params(self, params: SamplingParams) -> None:
        self._writer.check(params)

    def part_maker(self, params: SamplingParams, caller: Caller | None) -> Callable[[], RequestPart] | None:
        return (lambda: ReceiptPart(self._writer)) if params.receipt else None

    def start_check(self, check: Callable[[], Checked], tenant: str) -> Future[Checked] | None:
        """Start the check of a request on another thread (see EngineFeature), because the first check reads all files
        of the model."""
        if self._made is not None:
            return None
        pool = ThreadPoolExecutor(1)
        started = pool.submit(check)
        pool.shutdown(wait=False)
        return started

    @property
    def _writer(self) -> ReceiptWriter:
        with self._lock:
            if self._made is None:
                assert self._model is not None, "the engine has asked for a keeper"
                self._made = ReceiptWriter(self._model, self._key)
            return self._made
