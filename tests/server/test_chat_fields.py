"""Fields of chats that go to the template or repeat the prompt, and log-probabilities of the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider.async_llm import AsyncLLM
from outrider.config import EngineConfig
from outrider.engine.text import Tokenizer
from tests.engine.harness import VOCAB
from tests.server.rig import TEMPLATE, Served, serving, tiny_engine
from tests.server.test_fields import chunks

PICKY = ("{% for d in documents or [] %}({{ d.title }}: {{ d.text }}){% endfor %}{% for m in messages %}"
         "{% if m.role in ('user', 'assistant', 'critic') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}")
USER = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "Once upon"}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module", params=[TEMPLATE, PICKY], ids=["any role", "some roles"])
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(template: str) -> Iterator[Served]:
    with serving(lambda: AsyncLLM.around(tiny_engine(max_logprobs=VOCAB).engine)) as served:
        engine = served.llm.engine
        tokenizer = Tokenizer(engine.model.need_tokenizer().backend, chat_templates={"default": template})
        engine.model = replace(engine.model, tokenizer=tokenizer)
        yield served
        served.assert_idle()


def prompt_of(served: Served, **body: Any) -> str:
    answer = served.post(CHAT, max_tokens=1, return_token_ids=True, **body)
    assert answer.status_code == 200, answer.text
    return str(served.post("/detokenize", tokens=answer.json()["prompt_token_ids"]).json()["prompt"])


def test_a_role_of_its_own_reaches_a_template_that_writes_it(served: Served, template: str) -> None:
    assert "[critic]Bad." in prompt_of(served, messages=[USER, {"role": "critic", "content": "Bad."}])
    other = {"messages": [USER, {"role": "narrator", "content": [{"type": "text", "text": "Night."}]}]}
    if template == TEMPLATE:
        assert "[narrator]Night." in prompt_of(served, **other)
    else:
        error = served.error(CHAT, **other)
        assert error["param"] == "messages" and "leaves out messages of the role narrator" in error["message"]
    for wrong in ("users", "", "two words", "x" * 65, "<|im_end|>", None):
        assert served.error(CHAT, messages=[{"role": wrong, "content": "x"}])["param"] == "messages"


def test_documents_reach_a_template_that_reads_them(served: Served, template: str) -> None:
    body = {"messages": [USER], "documents": [{"title": "Sea", "text": "wet"}]}
    if template == PICKY:
        assert prompt_of(served, **body).startswith("(Sea: wet)[user]hi")
    else:
        error = served.error(CHAT, **body)
        assert error["param"] == "documents" and "does not use it" in error["message"]
    assert prompt_of(served, messages=[USER], documents=[]) == prompt_of(served, messages=[USER])


def test_an_answer_begins_with_the_message_that_it_continues(served: Served) -> None:
    body = {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": False}
    ask = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    plain = served.post(CHAT, **body, **ask).json()["choices"][0]["message"]["content"]
    echoed = served.post(CHAT, **body, **ask, echo=True).json()["choices"][0]["message"]["content"]
    assert echoed == "Once upon" + plain
    streamed = chunks(served, CHAT, **body, echo=True)
    assert "".join(choice["delta"].get("content") or "" for chunk in streamed for choice in chunk["choices"]) == echoed
    asked = {"messages": [USER]} | ask
    assert served.post(CHAT, **asked, echo=True).json()["choices"] == served.post(CHAT, **asked).json()["choices"]


def test_streams_give_the_token_ids_of_prompts_once(served: Served) -> None:
    whole = served.post(CHAT, messages=[USER], max_tokens=1, return_token_ids=True).json()["prompt_token_ids"]
    first, *others = chunks(served, CHAT, messages=[USER], return_token_ids=True, temperature=1, n=2)
    assert first["prompt_token_ids"] == whole and not any("prompt_token_ids" in chunk for chunk in others)
    found = chunks(served, "/v1/completions", prompt=["ab", "c"], return_token_ids=True, temperature=1, n=2)
    given = [(choice["index"], choice["prompt_token_ids"]) for chunk in found for choice in chunk["choices"]
             if "prompt_token_ids" in choice]
    one, other = ([*text.encode()] for text in ("ab", "c"))
    assert sorted(given) == [(0, one), (1, one), (2, other), (3, other)]
    assert "prompt_token_ids" not in str(chunks(served, "/v1/completions", prompt="ab"))


def test_minus_one_asks_for_the_log_probabilities_of_the_whole_vocabulary(served: Served) -> None:
    (choice,) = served.post("/v1/completions", prompt="ab", max_tokens=2, logprobs=-1, prompt_logprobs=-1,
                            return_tokens_as_token_ids=True).json()["choices"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [VOCAB, VOCAB]
    assert [entry and len(entry) for entry in choice["prompt_logprobs"]] == [None, VOCAB]
    (choice,) = served.post(CHAT, messages=[USER], max_tokens=2, logprobs=True, top_logprobs=-1).json()["choices"]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [VOCAB, VOCAB]


def test_a_setting_of_minus_one_is_the_size_of_the_vocabulary() -> None:
    config = EngineConfig("model", max_logprobs=-1)
    assert config.limits(gpu_bytes=None, max_positions=8, vocab_size=300, max_drafts=0).max_logprobs == 300


def test_a_server_without_so_many_log_probabilities_says_so() -> None:
    with serving() as served:
        assert "exceeds max_logprobs=5" in served.error("/v1/completions", prompt="a", logprobs=-1)["message"]
