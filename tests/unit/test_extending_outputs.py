"""A feature from outside the package that adds to the outputs of its requests: receipts are not the only ones.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, AsyncLLM, SamplingParams, feature_list
from outrider.commands.generate import as_json
from outrider.config import EngineConfig
from outrider.core.checked_request import CheckedRequest
from outrider.core.feature_parts import RequestPart
from outrider.core.outputs import OutputIncrement, SampleEnd, SampleKey
from outrider.core.request_keeper import RequestKeepers
from outrider.core.sample_addition import AddingPart, SampleAddition
from outrider.engine.engine_feature import Caller, EngineFeature
from outrider.feature_list import FeatureEntry
from tests.engine.harness import greedy, prompt_of, save_folder
from tests.engine.test_exact_mode import FAMILIES, VOCAB

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 3, "num_pages": 64,
                            "skip_tokenizer_init": True}
MADE: list[str] = []  # names of the threads that made values


class Steps(SampleAddition):
    name = "steps"

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len, self._runs = prompt_len, list[int]()

    def take(self, increment: OutputIncrement) -> None:
        self._runs.append(len(increment.token_ids))

    def finish(self, end: SampleEnd) -> Callable[[], Any]:
        return self._make

    def _make(self) -> dict[str, Any]:
        MADE.append(threading.current_thread().name)
        return {"prompt": self._prompt_len, "tokens": sum(self._runs)}


@dataclass(frozen=True)
class StepsPart(AddingPart):
    def make_additions(self, key: SampleKey, asked: CheckedRequest, keepers: RequestKeepers) -> list[SampleAddition]:
        return [Steps(len(asked.token_ids))]


class InEngine(EngineFeature):
    reads_extra_args = True

    def __init__(self, config: EngineConfig) -> None: ...

    def part_maker(self, params: SamplingParams, caller: Caller | None) -> Callable[[], RequestPart] | None:
        return StepsPart if params.extra_args else None


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    entry = FeatureEntry("steps of a sample", engine=InEngine, parameter="extra_args")
    monkeypatch.setitem(feature_list._registered, entry.name, entry)
    MADE.clear()
    return str(save_folder(tmp_path / "tiny", FAMILIES["llama"]))


def test_samples_get_what_a_feature_adds_when_it_is_read(folder: str) -> None:
    asked = SamplingParams(n=2, temperature=1, seed=3, max_tokens=5, ignore_eos=True, extra_args={"steps": True})
    with LLM(folder, **SETTINGS) as llm:
        plain, output = llm.generate([prompt_of(1, 9, VOCAB)] * 2, [greedy(5), asked], use_tqdm=False)
    assert dict(plain.outputs[0].extras) == {} and not MADE
    for sample in output.outputs:
        assert list(sample.extras) == ["steps"] and sample.extras["steps"] is sample.extras["steps"]
        assert dict(sample.extras) == dict(copy.deepcopy(sample).extras) == {"steps": {"prompt": 9, "tokens": 5}}
    assert len(MADE) == 2
    assert json.loads(json.dumps(as_json(output)))["outputs"][1]["extras"] == {"steps": {"prompt": 9, "tokens": 5}}


def test_an_aborted_sample_has_nothing_added(folder: str) -> None:
    with LLM(folder, **SETTINGS) as llm:
        llm.llm_engine.add_request("a", prompt_of(1, 9, VOCAB), greedy(40, ignore_eos=True, extra_args={"steps": True}))
        while not llm.llm_engine.step():
            continue
        llm.pause_generation()
        (output,) = [own for own in llm.llm_engine.step() if own.finished]
    assert output.outputs[0].finish_reason == "abort" and dict(output.outputs[0].extras) == {}


def test_no_value_is_made_by_the_engines_thread(folder: str) -> None:
    async def main() -> Any:
        async with AsyncLLM(folder, **SETTINGS) as llm:
            params = greedy(5, ignore_eos=True, extra_args={"steps": True})
            async for output in llm.generate(prompt_of(1, 9, VOCAB), params):
                last = output
            return last.outputs[0].extras["steps"]

    assert asyncio.run(main())["tokens"] == 5 and MADE == [threading.current_thread().name]
