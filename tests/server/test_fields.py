"""Fields of vLLM's bodies that change how an answer is written, and how long a prompt may be."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outrider.engine.text import Tokenizer
from outrider.server.settings import ServerConfig
from tests.server.rig import MODEL, Served, served_fixture, serving

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
ROUTES = [("/v1/completions", {"prompt": "Hello"}), ("/v1/chat/completions", CHAT)]

served = served_fixture()


def chunks(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    asked = {"stream": True, "max_tokens": 6, "temperature": 0, "ignore_eos": True} | body
    text = served.post(path, **asked).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_usage_of_a_stream(served: Served, path: str, body: dict[str, Any]) -> None:
    for options in (None, {}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}):
        plain = chunks(served, path, **body, stream_options=options)
        assert all(chunk["choices"] and "usage" not in chunk for chunk in plain), options
    *others, last = chunks(served, path, **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in others), "clients of OpenAI's API find the field in every chunk"
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("options", [{"include_usage": True, "continuous_usage_stats": True},
                                     {"continuous_usage_stats": True}])
def test_usage_of_every_chunk(served: Served, path: str, body: dict[str, Any], options: dict[str, bool]) -> None:
    found = chunks(served, path, **body, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts) and counts[-1] == 6 and found[-1]["choices"] == []
    for chunk in found:
        assert chunk["usage"]["total_tokens"] == chunk["usage"]["prompt_tokens"] + chunk["usage"]["completion_tokens"]
        if chunk["choices"] and chunk["choices"][0].get("delta", {}).get("role"):
            assert chunk["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_fields_of_vllms_answers_that_were_not_asked_for_are_null(served: Served, path: str,
                                                                  body: dict[str, Any]) -> None:
    """A client's object has an attribute for every field of the answer, and for no other."""
    answer = served.post(path, **body, max_tokens=1).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] is None
    if "messages" in body:
        assert choice["message"]["reasoning"] is None and choice["message"]["reasoning_content"] is None
    owner = answer if "messages" in body else choice
    assert owner["prompt_logprobs"] is None and owner["prompt_token_ids"] is None


def test_what_requests_leave_to_the_server_is_in_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda own, text, add: [texts.append(text), encode(own, text, add)][1])
    variables = {"enable_thinking": False, "colour": "red"}
    with serving(enable_force_include_usage=True, return_tokens_as_token_ids=True,
                 default_chat_template_kwargs=variables) as served:
        monkeypatch.setattr(served.service, "_chat_template", "{{ messages[0].content }} {{ enable_thinking }}")
        for path, body in ROUTES:
            found = chunks(served, path, **body, stream_options={"include_usage": False})
            assert [chunk["usage"]["completion_tokens"] for chunk in found][-1] == 6
        chat = served.post("/v1/chat/completions", **CHAT, max_tokens=1, logprobs=True,
                           chat_template_kwargs={"enable_thinking": True}).json()["choices"][0]
        assert chat["logprobs"]["content"][0]["token"].startswith("token_id:")
        text = served.post("/v1/completions", prompt="a", max_tokens=1, logprobs=0, return_tokens_as_token_ids=False)
        assert not text.json()["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
    assert texts == ["Hello", "Hello False", "Hello True", "a"]
    with pytest.raises(ValueError, match="must not set tools: requests have a field for it"):
        ServerConfig(default_chat_template_kwargs={"tools": []})


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_requests_own_id(served: Served, path: str, body: dict[str, Any]) -> None:
    prefix = "cmpl" if path == "/v1/completions" else "chatcmpl"
    assert served.post(path, **body, max_tokens=2, request_id="job:7").json()["id"] == f"{prefix}-job:7"
    assert {chunk["id"] for chunk in chunks(served, path, **body, request_id="job:7")} == {f"{prefix}-job:7"}
    for wrong in ("", "two words", "ü", "x" * 129, "line\n"):
        assert served.error(path, **body, request_id=wrong)["param"] == "request_id"


def test_clients_that_chose_the_same_id_do_not_meet(served: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        bodies = [{"prompt": [text, text], "max_tokens": 20, "request_id": "same"} for text in "abcd"]
        answers = list(pool.map(lambda body: served.post("/v1/completions", **body), bodies))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.json()["id"] for answer in answers} == {"cmpl-same"}


def test_tokens_named_by_their_ids(served: Served) -> None:
    ask = {"prompt": "ab", "logprobs": 2, "max_tokens": 4, "temperature": 0, "return_token_ids": True, "echo": True}
    texts = served.post("/v1/completions", **ask).json()["choices"][0]
    named = served.post("/v1/completions", **ask, return_tokens_as_token_ids=True).json()["choices"][0]
    ids = [*b"ab", *named["token_ids"]]
    assert named["text"] == texts["text"] and named["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
    assert named["logprobs"]["text_offset"] == texts["logprobs"]["text_offset"]
    for token_id, top in zip(ids[1:], named["logprobs"]["top_logprobs"][1:], strict=True):
        assert f"token_id:{token_id}" in top and all(name.startswith("token_id:") for name in top)

    ask = CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    texts = served.post("/v1/chat/completions", **ask).json()["choices"][0]
    named = served.post("/v1/chat/completions", **ask, return_tokens_as_token_ids=True).json()["choices"][0]
    pairs = zip(texts["logprobs"]["content"], named["logprobs"]["content"], named["token_ids"], strict=True)
    for text, own, token_id in pairs:
        assert own["token"] == f"token_id:{token_id}" == own["top_logprobs"][0]["token"]
        assert (own["bytes"], own["logprob"]) == (text["bytes"], text["logprob"])


def test_a_prompt_is_cut_at_its_beginning(served: Served) -> None:
    ask = {"max_tokens": 4, "temperature": 0, "echo": True}
    for prompt in ("x" * 90_000 + "the end", list(b"x" * 300 + b"the end")):
        answer = served.post("/v1/completions", prompt=prompt, truncate_prompt_tokens=7, **ask).json()
        assert answer["usage"]["prompt_tokens"] == 7 and answer["choices"][0]["text"].startswith("the end")
    right = served.post("/v1/completions", prompt="first, and more", truncate_prompt_tokens=5, truncation_side="right",
                        **ask).json()
    assert right["choices"][0]["text"].startswith("first") and right["usage"]["prompt_tokens"] == 5
    fitting = served.post("/v1/completions", prompt="x" * 500, truncate_prompt_tokens=-1, **ask).json()
    assert fitting["usage"]["prompt_tokens"] == 196 and fitting["usage"]["completion_tokens"] == 4
    long = {"messages": [{"role": "user", "content": "x" * 500}], "max_tokens": 4, "return_token_ids": True}
    chat = served.post("/v1/chat/completions", **long, truncate_prompt_tokens=20).json()
    assert bytes(chat["prompt_token_ids"]) == b"x" * 9 + b"[assistant]"
    fitting = served.post("/v1/chat/completions", **long, truncate_prompt_tokens=-1).json()
    assert fitting["usage"]["prompt_tokens"] == 196
    assert served.error("/v1/chat/completions", **long, truncate_prompt_tokens=201)["param"] == "truncate_prompt_tokens"
    assert served.error("/v1/responses", input="x", model=MODEL, truncate_prompt_tokens=3)["param"]
