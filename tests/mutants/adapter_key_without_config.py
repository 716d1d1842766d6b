"""An adapter's digest is that of its factors alone, so that one with another alpha finds its pages."""

from __future__ import annotations

from pathlib import Path

from outrider.core.file_digests import file_digest, value_digest
from outrider.features.adapters import host_adapter
from outrider.lora_request import TENSORS

NAME = "adapter key without config"
TESTS = ["tests/adapters/test_engine.py::test_adapters_that_differ_in_their_config_alone_share_no_pages"]


def apply() -> None:
    def digest_of_factors(folder: Path) -> str:
        return value_digest({TENSORS: file_digest(folder / TENSORS)})

    host_adapter._files_digest = digest_of_factors
