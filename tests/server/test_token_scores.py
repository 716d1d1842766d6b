"""/v1/score_tokens: what LLM.score_tokens gives, over HTTP."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.sample.logprobs import LogprobRows, logprob_rows
from outrider.server import answer_json
from outrider.token_scores import Scoring, TokenScores
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


def of_all(text: str) -> Any:
    """Parse JSON, which has neither NaN nor infinities."""
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_not_finite_is_written_as_json(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(logits: torch.Tensor, chosen: torch.Tensor, num: int) -> LogprobRows:
        rows = logprob_rows(logits, chosen, num)
        rows.values[0], rows.values[1] = math.nan, -math.inf
        return rows

    monkeypatch.setattr("outrider.runner.prompt_reports.logprob_rows", broken)
    (own,) = of_all(served.post("/v1/score_tokens", prompt=IDS[0], prompt_logprobs=2).text)["data"]
    assert own["logprobs"][:3] == [None, None, -9999.0] and own["logprobs"][3] < 0
    assert own["top_logprobs"][:3] == [None, [None, None], [-9999.0, -9999.0]]
    for asked in ({"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}):
        of_all(served.post("/v1/completions", prompt=IDS[0], max_tokens=1, **asked).text)


def test_wide_answers_are_made_in_a_thread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the number of tokens that makes an answer large, but that of log-probabilities."""
    threads, read = list[str](), Scoring.read

    def noted(self: Scoring, *given: Any) -> TokenScores:
        threads.append(threading.current_thread().name)
        return read(self, *given)

    monkeypatch.setattr(Scoring, "read", noted)
    monkeypatch.setattr(answer_json, "LONG_ANSWER", 10)
    for num, is_beside in ((0, False), (5, True)):
        data_of(served, prompt=IDS[0], prompt_logprobs=num)
        assert threads.pop().startswith("outrider-work") == is_beside


@pytest.mark.parametrize("path", ["/v1/score_tokens", "/v1/completions"])
@pytest.mark.parametrize(("body", "param"), [
    ({"bad_words": ["a"] * 1025}, "bad_words"), ({"bad_words": ["a" * 5000] * 4}, "bad_words"),
    ({"allowed_token_ids": [1] * 300}, "allowed_token_ids"),
    ({"logit_bias": {str(token): 1.0 for token in range(5000)}}, "logit_bias"),
])
def test_sizes_are_bounded_as_for_completions(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    asked = body if path == "/v1/completions" else body | {"logprobs_mode": "processed"}
    assert served.error(path, prompt=[1, 2], **asked)["param"] == param


def test_parameters_of_a_large_body_are_checked_in_a_thread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, check = list[str](), SamplingParams.__post_init__

    def noted(self: SamplingParams, *given: Any) -> None:
        threads.append(threading.current_thread().name)
        check(self, *given)

    monkeypatch.setattr(SamplingParams, "__post_init__", noted)
    words = ["a" * 100] * 160
    for path, more in (("/v1/score_tokens", {"logprobs_mode": "processed"}), ("/v1/completions", {"max_tokens": 1})):
        assert served.post(path, prompt=[1, 2], bad_words=words, user="x" * 20_000, **more).status_code == 200
        assert threads and all(not name.startswith("Thread-") for name in threads), threads
        threads.clear()


@pytest.mark.parametrize(("body", "param"), [
    ({}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[1]] * 5}, "prompt"), ({"prompt": [999]}, None),
    ({"prompt": [1], "prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt": [1], "prompt_logprobs": 9}, "prompt_logprobs"),
    ({"prompt": [1], "prompt_logprobs": 1 << 40}, "prompt_logprobs"),
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
