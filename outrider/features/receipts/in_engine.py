"""ReceiptsInEngine: reads the key that signs receipts when the engine starts, so that a wrong key file is reported at
once."""

from __future__ import annotations

from outrider.config import EngineConfig
from outrider.engine.engine_feature import EngineFeature
from outrider.features.receipts.receipt import read_key


class ReceiptsInEngine(EngineFeature):
    def __init__(self, config: EngineConfig) -> None:
        assert config.receipt_key_file is not None
        read_key(config.receipt_key_file)
