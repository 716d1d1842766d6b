"""A request is one value from the fronts to the admission, and it is checked once."""

from __future__ import annotations

import ast
import asyncio
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import LLM, AsyncLLM, PoolingParams, SamplingParams, StructuredOutputsParams
from outrider.engine.request_checks import RequestChecks
from outrider.features.embeddings.part import PromptEmbeds
from outrider.features.grammars.compiler import GrammarCompiler
from tests.counted import count_calls
from tests.engine.harness import Rig, byte_tokenizer, greedy, tiny_model
from tests.unit.made_requests import made_request

PACKAGE = Path(__file__).parents[2] / "outrider"
FORM = SamplingParams(max_tokens=2, temperature=0, structured_outputs=StructuredOutputsParams(regex="[ab]{4}"))


def calls_of(name: str) -> set[str]:
    """Modules of the package that call a name."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        nodes = ast.walk(ast.parse(text)) if f"{name}(" in text else ()
        if any(isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
               for node in nodes):
            found.add(path.relative_to(PACKAGE).as_posix())
    return found


def test_checked_requests_are_made_by_the_checks_alone() -> None:
    """Beside the placeholder of the null row, and simulated requests, which come from no user."""
    assert calls_of("CheckedRequest") == {"engine/request_checks.py", "core/checked_request.py",
                                          "simulation/replica.py"}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_calls(monkeypatch, (RequestChecks, "_check"), (RequestChecks, "_check_params"),
                       (GrammarCompiler, "check"))


def times(prompts: int, params: int, grammars: int = 0) -> Counter[str]:
    return Counter({"RequestChecks._check": prompts, "RequestChecks._check_params": params,
                    "GrammarCompiler.check": grammars})


def small_engine() -> Rig:
    return Rig(tiny_model("llama"), tokenizer=byte_tokenizer(), eos_ids=(2,))


def test_prompts_that_share_parameters_check_them_once(counted: Counter[str]) -> None:
    with small_engine() as rig:
        llm = LLM.around(rig.engine)
        llm.generate(["ab", [5, 6], {"prompt": "x"}], greedy(2), use_tqdm=False)
        assert counted == times(prompts=3, params=1)
        llm.generate(["ab", "c"], FORM, use_tqdm=False)
        assert counted == times(prompts=5, params=2, grammars=1)


def test_an_async_request_is_checked_once(counted: Counter[str]) -> None:
    async def main(rig: Rig) -> None:
        async with AsyncLLM.around(rig.engine) as llm:
            assert [output async for output in llm.generate("ab", FORM)][-1].finished
            assert counted == times(prompts=1, params=1, grammars=1)
            assert [output async for output in llm.encode("ab")][-1].finished
            assert counted == times(prompts=2, params=2, grammars=1)

    with small_engine() as rig:
        asyncio.run(main(rig))


def test_a_request_keeps_nothing_that_its_caller_can_change() -> None:
    with small_engine() as rig:
        given: dict[str, Any] = {"prompt_token_ids": [5, 6], "cache_salt": "x"}
        params = SamplingParams(stop_token_ids=[3])
        request = rig.engine.checks.check(given, params, 4)
        given["prompt_token_ids"].append(7)
        params.stop_token_ids.append(10**9)  # type: ignore[union-attr]
        assert request.token_ids == (5, 6) and request.sampling.stop_token_ids == [3]
        assert (request.cache_salt, request.priority, request.text) == ("x", 4, None)
        assert rig.engine.checks.check("ab", params.__class__()).text == "ab"


def test_a_seed_is_drawn_for_requests_without_one_that_sample() -> None:
    request = made_request([5], seed=3)
    assert request.with_seed(4) is request
    pooled = made_request([5])
    object.__setattr__(pooled, "params", PoolingParams())
    assert pooled.with_seed(4) is pooled and not pooled.generates and pooled.num_samples == 1
    unseeded = made_request([5])
    unseeded.sampling.seed = None
    assert unseeded.with_seed(4).seed == 4 and unseeded.sampling.seed is None


def test_a_worker_elsewhere_gets_a_request_whole() -> None:
    request = made_request([5, 6], greedy(3), cache_salt="s", priority=2, text="ab")
    assert pickle.loads(pickle.dumps(request)) == request


def test_embeddings_reach_a_worker_and_tell_pages_apart() -> None:
    embeds = PromptEmbeds(np.ones((2, 4), dtype=np.float32), np.arange(2), "abc")
    request = made_request([0, 0], cache_salt="s", parts=(embeds,))
    sent = pickle.loads(pickle.dumps(request))
    (own,) = sent.input_parts
    assert np.array_equal(own.values, embeds.values) and own.digest == "abc"
    assert request.cache_keys == ("embeds=abc", "salt=s")
    salted = made_request([0, 0], cache_salt="x\x00embeds=abc\x00salt=s")
    assert "\x00".join(salted.cache_keys) != "\x00".join(request.cache_keys), "no salt reads like embeddings"
