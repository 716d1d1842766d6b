"""Routes of a trainer: pauses, and checksums of weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider import AsyncLLM
from tests.engine.test_update_weights import SETTINGS, llama
from tests.engine.test_weights_checksum import of_file
from tests.server.rig import Served, serving

LONG = {"max_model_len": 4096, "num_pages": 400}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return llama(tmp_path, max_position_embeddings=4096)


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with serving(lambda: AsyncLLM(str(folder), **SETTINGS | LONG), admin=True) as made:
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


def test_a_pause_over_http_in_all_modes(served: Served, folder: Path) -> None:
    body = {"prompt": [5, 6, 7] * 4, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def ask(**more: Any) -> dict[str, Any]:
        return served.post("/v1/completions", **body | more).json()["choices"][0]

    def paused(mode: str, max_tokens: int = 40, **more: str) -> Future[dict[str, Any]]:
        """The answer to a request in the middle of which the server was paused."""
        before = served.llm.engine.stats.num_generation_tokens
        asked = pool.submit(ask, max_tokens=max_tokens)
        served.wait_for(lambda: served.llm.engine.stats.num_generation_tokens > before)
        answer = served.http.post("/pause", params={"mode": mode, **more})
        assert answer.json() == {"status": "paused"} and served.http.get("/is_paused").json() == {"is_paused": True}
        return asked

    def resume() -> None:
        assert served.http.post("/resume").json() == {"status": "resumed"}
        assert served.http.get("/is_paused").json() == {"is_paused": False}

    whole = ask()
    with ThreadPoolExecutor(1) as pool:
        aborted = paused("abort", 3000).result()
        num_common = min(40, len(aborted["token_ids"]))
        assert aborted["finish_reason"] == "abort" and len(aborted["token_ids"]) < 3000
        assert aborted["token_ids"][:num_common] == whole["token_ids"][:num_common]
        assert "the engine is paused" in served.http.get("/ready").json()["error"]["message"]
        resume()
        waited = paused("wait")
        assert waited.result() == whole
        resume()
        for clear_cache in ("true", "false"):
            kept = paused("keep", clear_cache=clear_cache)
            resume()
            assert kept.result() == whole
    for query, param in (("mode=drain", "mode"), ("clear_cache=perhaps", "clear_cache"), ("level=1", "level")):
        refused = served.http.post(f"/pause?{query}")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
