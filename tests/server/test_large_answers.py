"""Answers that repeat a long prompt, or have many log-probabilities, are made beside the event loop, each part once."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from outrider.engine.text import Tokenizer
from outrider.server import answer_json
from outrider.server.answer_json import Written, write_answer
from tests.server.rig import Served, served_fixture

served = served_fixture()
NUM_SAMPLES = 4
REPEATED = [{"echo": True}, {"echo": True, "logprobs": 2}, {"prompt_logprobs": 2}, {"return_token_ids": True}]


def rounded(value: Any) -> Any:
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 2))


@pytest.mark.parametrize("asked", REPEATED, ids=str)
def test_choices_of_one_prompt_have_its_parts_as_a_request_alone_has(served: Served, asked: dict[str, Any]) -> None:
    body = {"max_tokens": 3, "allowed_token_ids": [97], "ignore_eos": True} | asked
    prompts = ["abc", "a longer one"]
    alone = [rounded(served.post("/v1/completions", prompt=prompt, **body).json()["choices"][0]) for prompt in prompts]
    choices = served.post("/v1/completions", prompt=prompts, n=NUM_SAMPLES, **body).json()["choices"]
    assert rounded(choices) == [alone[index // NUM_SAMPLES] | {"index": index} for index in range(2 * NUM_SAMPLES)]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_decoded_once(served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, decoded = Tokenizer.decode, list[str]()

    def noted(self: Tokenizer, token_ids: Any, skip_special_tokens: bool = True) -> str:
        if len(token_ids) > 50:
            decoded.append(threading.current_thread().name)
        return decode(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    monkeypatch.setattr(answer_json, "LONG_ANSWER", 50)
    answer = served.post("/v1/completions", prompt="a" * 80, n=NUM_SAMPLES, max_tokens=1, echo=True, stream=stream)
    assert answer.status_code == 200 and answer.text.count("a" * 80) == NUM_SAMPLES
    assert len(decoded) == 1 and decoded[0].startswith("outrider-work"), decoded


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_long_answers_are_written_in_a_thread(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, encode = list[str](), answer_json.compact

    def noted(value: Any) -> str:
        threads.append(threading.current_thread().name)
        return encode(value)

    monkeypatch.setattr(answer_json, "compact", noted)
    asked: dict[str, Any] = {"prompt": "abc", "logprobs": 2} if path == "/v1/completions" else {
        "messages": [{"role": "user", "content": "abc"}], "logprobs": True, "top_logprobs": 2}
    for limit, is_beside in ((answer_json.LONG_ANSWER, False), (5, True)):
        monkeypatch.setattr(answer_json, "LONG_ANSWER", limit)
        assert served.post(path, max_tokens=9, ignore_eos=True, **asked).status_code == 200
        assert {name.startswith("outrider-work") for name in threads} == {is_beside}
        threads.clear()


def long_value() -> dict[str, Any]:
    return {"id": "a", "empty": [], "none": None, "object": {}, "numbers": list(range(1000)), "choices": [
        {"text": "ü\"\n" * 30_000, "logprobs": {"content": [
            {"token": str(i), "top": [{"a": None}]} for i in range(500)]}},
        {"texts": [None, "b", 0.5]}]}


def written(value: dict[str, Any]) -> list[bytes]:
    return asyncio.run(write_answer(lambda: value, 0))


def test_an_answer_is_the_json_of_its_value() -> None:
    assert b"".join(written(long_value())) == answer_json.compact(long_value()).encode()


def test_no_call_of_the_encoder_writes_a_long_list(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, longest = answer_json.compact, [0]

    def noted(value: Any) -> str:
        longest[0] = max(longest[0], len(value) if isinstance(value, list) else 0)
        return encode(value)

    monkeypatch.setattr(answer_json, "compact", noted)
    written(long_value())
    assert 0 < longest[0] <= answer_json.SLICE


@pytest.mark.parametrize("first", [[], [None], list(range(100_000))], ids=len)
@pytest.mark.parametrize("more", [[], [{"a": 1}], [3] * 70], ids=len)
def test_a_written_list_is_shared_and_extended(first: list[Any], more: list[Any]) -> None:
    shared = Written.from_value(first)
    answer = written({"a": [{"b": shared}, {"b": shared.extended(more)}, {"b": shared}]})
    assert json.loads(b"".join(answer)) == {"a": [{"b": first}, {"b": first + more}, {"b": first}]}
    assert json.loads(b"".join(shared)) == first, "the shared list has changed"
    if len(first) > 1000:
        assert sum(part is max(shared, key=len) for part in answer) == 3, "the long part was copied"
