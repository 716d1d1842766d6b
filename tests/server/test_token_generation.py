"""/inference/v1/generate: token ids in, token ids out, as SkyRL's and TRL's clients ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import AsyncLLM
from tests.engine.test_update_weights import SETTINGS, llama
from tests.server.rig import Served, serving

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = llama(tmp_path_factory.mktemp("model"))
    with serving(lambda: AsyncLLM(str(folder), **SETTINGS | {"skip_tokenizer_init": True})) as made:
        yield made


def generate(served: Served, **params: Any) -> dict[str, Any]:
    answer = served.post("/inference/v1/generate", token_ids=PROMPT, sampling_params=params)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_tokens_are_those_of_completions(served: Served) -> None:
    params = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 6, "logprobs": 1, "prompt_logprobs": 2}
    found = generate(served, **params, output_kind=2, detokenize=False)
    wanted = served.post("/v1/completions", prompt=PROMPT, return_token_ids=True, return_tokens_as_token_ids=True,
                         **params).json()
    assert found["usage"] == wanted["usage"] and found["kv_transfer_params"] is None
    for ours, theirs in zip(found["choices"], wanted["choices"], strict=True):
        assert ours["token_ids"] == theirs["token_ids"] and ours["finish_reason"] == theirs["finish_reason"]
        content, log = ours["logprobs"]["content"], theirs["logprobs"]
        assert [each["token"] for each in content] == log["tokens"]
        assert [each["logprob"] for each in content] == log["token_logprobs"]
        assert all(len(each["top_logprobs"]) >= 1 for each in content)
        assert ours["weight_versions"] == [[0, 0, len(ours["token_ids"])]]
        assert found["prompt_logprobs"] == theirs["prompt_logprobs"]


def test_what_skyrl_reads(served: Served) -> None:
    """The fields that SkyRL 0.3 reads of a body that it sends."""
    body = {"sampling_params": {"temperature": 1.0, "max_tokens": 4, "logprobs": 0, "min_tokens": 0, "top_k": -1,
                                "top_p": 1.0, "min_p": 0.0, "stop": None, "ignore_eos": False},
            "model": served.http.get("/v1/models").json()["data"][0]["id"], "token_ids": PROMPT, "cache_salt": "a"}
    choice = served.post("/inference/v1/generate", **body).json()["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 4
    assert choice["finish_reason"] == "length" and choice.get("routed_experts") is None


def test_sampling_masks_are_fields_of_the_choices(tmp_path: Path) -> None:
    """The fields that prime-rl reads, of a server whose setting asks for them, as vLLM's does."""
    folder = llama(tmp_path)
    settings = SETTINGS | {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs"}
    with serving(lambda: AsyncLLM(str(folder), return_sampling_mask=True, **settings)) as served:
        (choice,) = generate(served, temperature=1.0, top_k=4, seed=3, max_tokens=6, logprobs=1)["choices"]
        greedy = generate(served, temperature=0, max_tokens=3)["choices"][0]
    assert len(choice["sampling_mask"]) == len(choice["token_ids"]) == 6
    for token, kept in zip(choice["token_ids"], choice["sampling_mask"], strict=True):
        assert token in kept and len(kept) == 4
    assert all(len(each["top_logprobs"]) <= 2 for each in choice["logprobs"]["content"])
    assert "sampling_mask" not in greedy


@pytest.mark.parametrize(("body", "words"), [
    ({"sampling_params": {"temprature": 1}}, "did you mean temperature"),
    ({"sampling_params": {"model": "a"}}, "model is not a sampling parameter"),
    ({"stream": True}, "stream must be false"),
    ({"token_ids": []}, "token"),
    ({"token_ids": [1 << 40]}, "vocab"),
    ({"features": {"mm_hashes": {}}}, "features"),
    ({"model": "another"}, "no model 'another'"),
])
def test_other_bodies_are_refused(served: Served, body: dict[str, Any], words: str) -> None:
    answer = served.post("/inference/v1/generate", **{"token_ids": PROMPT} | body)
    assert answer.status_code in (400, 404) and words in answer.json()["error"]["message"], answer.text
