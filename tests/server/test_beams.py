"""use_beam_search: the answers over HTTP are those of `LLM.beam_search`."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import LLM, BeamSearchParams
from outrider.async_llm import AsyncLLM
from tests.server.rig import Served, served_fixture, tiny_engine

ROUTES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "ab"}, "ab"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "[user]hi[assistant]")]
EOS = 101

served = served_fixture(lambda: AsyncLLM.around(tiny_engine(max_logprobs=12, eos_ids=(EOS,)).engine))


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize(("path", "body", "prompt"), ROUTES)
@pytest.mark.parametrize("penalty", [1.0, 0.2])
def test_the_answers_are_those_of_the_offline_search(served: Served, path: str, body: dict[str, Any], prompt: str,
                                                     penalty: float) -> None:
    with LLM.around(tiny_engine(max_logprobs=12, eos_ids=(EOS,)).engine) as llm:
        (found,) = llm.beam_search([prompt], BeamSearchParams(3, 6, length_penalty=penalty))
    answer = served.post(path, **body, n=3, max_tokens=6, use_beam_search=True, length_penalty=penalty, temperature=0,
                         return_token_ids=True).json()
    num = len(prompt)
    assert [choice["token_ids"] for choice in answer["choices"]] == [beam.tokens[num:] for beam in found.sequences]
    assert [prompt + text_of(choice) for choice in answer["choices"]] == [beam.text for beam in found.sequences]
    assert [choice["finish_reason"] for choice in answer["choices"]] == [b.finish_reason for b in found.sequences]
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == num
    served.assert_idle()


def test_several_prompts_are_searched_together(served: Served) -> None:
    ask = {"n": 2, "max_tokens": 4, "use_beam_search": True}
    both = served.post("/v1/completions", prompt=["ab", "xyz"], **ask).json()["choices"]
    each = [choice for prompt in ("ab", "xyz") for choice in
            served.post("/v1/completions", prompt=prompt, **ask).json()["choices"]]
    assert [choice["text"] for choice in both] == [choice["text"] for choice in each]
    assert [choice["index"] for choice in both] == [0, 1, 2, 3]


@pytest.mark.parametrize(("fields", "param"), [
    ({"stream": True}, "stream"), ({"top_p": 0.5}, "top_p"), ({"stop": "x"}, "stop"), ({"n": 7}, "n"), ({"n": 65}, "n"),
    ({"temperature": 0.5}, "temperature"), ({"length_penalty": 1e30}, "length_penalty"), ({"logprobs": 2}, "logprobs"),
    ({"response_format": {"type": "json_object"}}, "structured_outputs"), ({"logit_bias": {"5": 1}}, "logit_bias"),
])
def test_what_beam_search_does_not_have_is_refused_by_name(served: Served, fields: dict[str, Any], param: str) -> None:
    error = served.error("/v1/completions", prompt="a", use_beam_search=True, **fields)
    assert param in error["message"] and error["param"] == param, error
    assert served.error("/v1/completions", prompt="a", length_penalty=2)["param"] == "length_penalty"
    neutral = {"length_penalty": 1, "top_p": 1.0, "stream": False, "response_format": {"type": "text"}}
    assert served.post("/v1/completions", prompt="a", use_beam_search=True, **neutral).status_code == 200
