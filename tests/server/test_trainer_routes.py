"""Routes of a trainer: checksums of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import AsyncLLM
from tests.engine.test_update_weights import SETTINGS, llama
from tests.engine.test_weights_checksum import of_file
from tests.server.rig import Served, serving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return llama(tmp_path)


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with serving(lambda: AsyncLLM(str(folder), **SETTINGS), admin=True) as made:
        yield made


def test_checksums_are_those_of_the_files_and_can_be_compared(served: Served, folder: Path) -> None:
    stored = of_file(folder)
    assert "nothing to compare with" in served.error("/weight_checker", action="compare")["message"]
    first = served.post("/weight_checker", action="checksum").json()
    assert first["checksums"] == stored and first["baseline_created"] and not first["coded"]
    assert set(first["dtypes"].values()) == {"float32"}
    again = served.post("/weights_checker", action="checksum").json()
    assert not again["baseline_created"] and again["sha256"] == first["sha256"]
    assert served.post("/weight_checker", action="compare").json() == {"match": True, "mismatches": []}
    served.error("/weight_checker", action="compare")
    name = next(iter(stored))
    told = served.post("/weight_checker", action="compare", baseline=stored | {name: "0" * 64, "more": "0"}).json()
    assert told == {"match": False, "mismatches": sorted([name, "more"])}
    for action in ("reset", "other"):
        assert served.error("/weight_checker", action=action)["param"] == "action"
    served.http.post("/sleep")
    assert "the weights sleep" in served.error("/weight_checker", action="checksum")["message"]
