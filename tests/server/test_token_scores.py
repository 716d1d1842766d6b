"""/v1/score_tokens: what LLM.score_tokens gives, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.rig import MODEL, Served, served_fixture

served = served_fixture(max_prompts=4)
IDS = [[5, 6, 7, 8], [9, 10]]


def data_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    answer = served.post("/v1/score_tokens", **body)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


def test_scores_are_those_of_prompt_logprobs(served: Served) -> None:
    found = data_of(served, model=MODEL, prompt=IDS, prompt_logprobs=2)
    assert [own["index"] for own in found] == [0, 1] and [own["token_ids"] for own in found] == IDS
    told = served.post("/v1/completions", prompt=IDS, max_tokens=1, prompt_logprobs=2).json()["choices"]
    for own, choice in zip(found, told, strict=True):
        assert own["logprobs"][0] is own["ranks"][0] is own["top_ids"][0] is None and own["kept_ids"] is None
        for at, entry in enumerate(choice["prompt_logprobs"][1:], 1):
            value = entry[str(own["token_ids"][at])]
            assert (own["logprobs"][at], own["ranks"][at]) == (value["logprob"], value["rank"])
            assert [entry[str(token)]["logprob"] for token in own["top_ids"][at]] == own["top_logprobs"][at]
            assert len(own["top_ids"][at]) == 2
        assert own["weights_version"] == 0
    usage = served.post("/v1/score_tokens", prompt=IDS).json()["usage"]
    assert usage["prompt_tokens"] == 6 and usage["completion_tokens"] == 0


def test_filters_and_texts(served: Served) -> None:
    (own,) = data_of(served, prompt=IDS[0], logprobs_mode="processed_logprobs", temperature=0.5, top_k=1,
                     return_kept_ids=False)
    assert all(value in (-9999.0, 0.0) for value in own["logprobs"][1:])
    (own,) = data_of(served, prompt="ab", prompt_logprobs=1)
    assert own["token_ids"] == [97, 98] and own["top_logprobs"][1]


@pytest.mark.parametrize(("body", "param"), [
    ({}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[1]] * 5}, "prompt"), ({"prompt": [999]}, None),
    ({"prompt": [1], "prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt": [1], "prompt_logprobs": 9}, "prompt_logprobs"),
    ({"prompt": [1], "temperature": 0.5}, None), ({"prompt": [1], "return_kept_ids": True}, "return_kept_ids"),
    ({"prompt": [1], "top_p": 2, "logprobs_mode": "processed"}, "top_p"), ({"prompt": [1], "n": 2}, "n"),
    ({"prompt": [1], "stream": True}, "stream"), ({"prompt": [1], "logprobs_mode": "logits"}, "logprobs_mode"),
])
def test_errors_name_the_field(served: Served, body: dict[str, Any], param: str | None) -> None:
    error = served.error("/v1/score_tokens", **body)
    assert param is None or error["param"] == param, error


def test_an_answer_has_bounded_size(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.server.token_scoring.MAX_NUMBERS", 11)
    assert "at most 11" in served.error("/v1/score_tokens", prompt=IDS, prompt_logprobs=1)["message"]
    assert data_of(served, prompt=IDS)
