"""The official client against a server with a tiny model: answers, streams, samples, log-probabilities, drafts."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from outrider import SamplingParams
from tests.server.rig import MODEL, Served, served_fixture

PROMPT = "The sea is the sea is"
CHAT = [{"role": "user", "content": "hello hello"}]

served = served_fixture()


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return served.client()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    card = client.models.retrieve(MODEL)
    assert card.object == "model" and card.max_model_len == 200  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="this server has no model"):
        client.models.retrieve("other")


def test_a_completion_and_its_stream_are_the_same_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0)
    chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stream=True,
                                            stream_options={"include_usage": True}))
    assert whole.choices[0].finish_reason == "length"
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details})
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 24)
    assert {c.id for c in chunks} == {chunks[0].id} and chunks[0].object == "text_completion"


def test_several_prompts_and_samples_keep_their_order(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "one two", "x"]
    options = {"model": MODEL, "max_tokens": 8, "seed": 5, "n": 2}
    whole = client.completions.create(prompt=prompts, **options)
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert len({choice.text for choice in whole.choices}) == 6
    alone = [client.completions.create(prompt=list(prompt.encode()), **options) for prompt in prompts]
    assert [c.text for c in whole.choices] == [c.text for one in alone for c in one.choices]
    texts = [""] * 6
    for chunk in client.completions.create(prompt=prompts, stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_a_chat_and_its_stream_are_the_same_text(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": CHAT, "seed": 3, "max_completion_tokens": 20, "n": 2}
    whole = client.chat.completions.create(**options)
    texts, reasons = ["", ""], {}
    for i, chunk in enumerate(client.chat.completions.create(stream=True, **options)):
        choice = chunk.choices[0]
        assert (choice.delta.role == "assistant") == (i < 2), "the role comes once, first"
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices] and texts[0] != texts[1]
    assert reasons == {0: "length", 1: "length"}


def test_the_streaming_helper_of_the_client_accepts_the_stream(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": CHAT, "max_tokens": 40, "temperature": 0}
    text = client.chat.completions.create(**options).choices[0].message.content
    with client.chat.completions.stream(stop=text[20], stream_options={"include_usage": True}, **options) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[: text.index(text[20])]
    assert final.usage is not None and final.usage.completion_tokens > 0


def test_a_chat_without_a_limit_ends_at_the_models_length(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 200 and answer.choices[0].finish_reason == "length"


def test_log_probabilities_of_completions(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 3}
    whole = client.completions.create(**options).choices[0].logprobs
    assert len(whole.tokens) == len(whole.token_logprobs) == len(whole.top_logprobs) == 12
    assert whole.text_offset[0] == 0 and whole.text_offset == sorted(whole.text_offset)
    assert all(max(top.values()) == value for top, value in zip(whole.top_logprobs, whole.token_logprobs, strict=True))
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **options)]
    assert [t for part in parts for t in part.tokens] == whole.tokens
    assert [t for part in parts for t in part.text_offset] == whole.text_offset


def test_log_probabilities_of_chats(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": CHAT, "max_tokens": 9, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    assert len(whole) == 9 and all(len(entry.top_logprobs) == 2 for entry in whole)
    assert all(entry.top_logprobs[0].logprob == entry.logprob <= 0 for entry in whole)
    parts = [c.choices[0].logprobs for c in client.chat.completions.create(stream=True, **options)]
    assert [entry for part in parts if part for entry in part.content] == whole


def test_the_prompt_comes_back_with_its_log_probabilities(client: openai.OpenAI, served: Served) -> None:
    """As evaluations score given texts: the prompt's own log-probabilities, and one token more."""
    options: Any = {"model": MODEL, "prompt": "abc", "max_tokens": 2, "temperature": 0, "logprobs": 2}
    plain = client.completions.create(**options, extra_body={"prompt_logprobs": 2})
    echoed = client.completions.create(**options, echo=True)
    choice, logprobs = echoed.choices[0], echoed.choices[0].logprobs
    assert choice.text == "abc" + plain.choices[0].text and logprobs is not None
    assert logprobs.tokens[:3] == ["a", "b", "c"] and logprobs.text_offset == [0, 1, 2, 3, 3 + len(logprobs.tokens[3])]
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    given = plain.choices[0].model_extra["prompt_logprobs"]
    ids = served.post("/tokenize", prompt="abc").json()["tokens"]
    for i in (1, 2):
        assert logprobs.token_logprobs[i] == pytest.approx(given[i][str(ids[i])]["logprob"], abs=1e-4)
    assert logprobs.token_logprobs[3:] == plain.choices[0].logprobs.token_logprobs
    error = served.error("/v1/completions", prompt="a", echo=True, stream=True, logprobs=1)
    assert error["param"] == "echo" and "cannot be streamed" in error["message"]


@pytest.mark.parametrize("max_tokens", [0, 1, 9])
def test_a_prompt_comes_back_in_a_stream(client: openai.OpenAI, max_tokens: int) -> None:
    options: Any = {"model": MODEL, "prompt": ["ab", "日x"], "n": 2, "seed": 3, "echo": True,
                    "max_tokens": max_tokens}
    whole = client.completions.create(**options)
    texts, reasons = [""] * 4, [""] * 4
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += choice.finish_reason or ""
        usage = chunk.usage
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0].startswith("ab") and texts[3].startswith("日x")
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens == 4 * max_tokens


def test_stop_strings_and_stop_tokens(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    word = next(char for char in text[4:] if char.isascii() and char not in text[:4])
    stopped = client.completions.create(stop=[word], **options).choices[0]
    assert stopped.text == text[: text.index(word)] and stopped.finish_reason == "stop"
    assert stopped.stop_reason == word  # type: ignore[attr-defined]
    by_id = client.completions.create(extra_body={"stop_token_ids": [ord(word)]}, **options).choices[0]
    assert by_id.finish_reason == "stop" and by_id.text == stopped.text


def test_answers_say_how_drafts_fared_and_a_request_may_do_without(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": "ab" * 20, "max_tokens": 40, "temperature": 0}
    drafted = client.completions.create(**options)
    counts = drafted.metrics["speculative_decoding"]  # type: ignore[attr-defined]
    assert counts["num_draft_tokens"] > 0 and counts["num_spec_steps"] > 0
    assert counts["num_accepted_draft_tokens"] == sum(counts["num_accepted_tokens_per_pos"])
    plain = client.completions.create(extra_body={"speculative": False}, **options)
    assert plain.metrics["speculative_decoding"]["num_draft_tokens"] == 0  # type: ignore[attr-defined]
    assert plain.metrics["speculative_decoding"]["num_spec_steps"] == 0  # type: ignore[attr-defined]
    assert plain.choices[0].text == drafted.choices[0].text


def test_token_ids_come_back_on_request(client: openai.OpenAI, served: Served) -> None:
    answer = client.completions.create(model=MODEL, prompt=[1, 5, 9], max_tokens=6, temperature=0,
                                       extra_body={"return_token_ids": True})
    assert answer.choices[0].prompt_token_ids == [1, 5, 9]  # type: ignore[attr-defined]
    rig = served.llm.engine
    assert len(answer.choices[0].token_ids) == 6 and rig.limits.vocab_size == 256  # type: ignore[attr-defined]


def test_tokenize_and_detokenize(served: Served) -> None:
    info = served.http.get("/tokenizer_info").json()
    assert info["model_max_length"] == 200 and "messages" in info["chat_template"] and "eos_token" in info
    text = "naïve 😀"
    tokens = served.post("/tokenize", prompt=text, return_token_strs=True).json()
    assert tokens["tokens"] == list(text.encode())
    assert tokens["count"] == len(text.encode()) == len(tokens["token_strs"])
    assert served.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}
    chat = served.post("/tokenize", messages=CHAT).json()["tokens"]
    assert bytes(chat) == b"[user]hello hello[assistant]"


def test_a_message_of_the_assistant_may_be_continued(client: openai.OpenAI, served: Served) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Well"}]
    options = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    answer = client.chat.completions.create(messages=messages, extra_body={"continue_final_message": True}, **options)
    same = client.completions.create(prompt="[user]hello hello[assistant]Well", **options)
    assert answer.choices[0].message.content == same.choices[0].text
    tokens = served.post("/tokenize", messages=messages, continue_final_message=True).json()["tokens"]
    assert bytes(tokens) == b"[user]hello hello[assistant]Well"
    for path in ("/v1/chat/completions", "/tokenize"):
        error = served.error(path, messages=messages, continue_final_message=True, add_generation_prompt=True)
        assert error["param"] == "continue_final_message" and "only one of them" in error["message"]


def test_a_prefix_hit_shows_in_the_usage(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": "prefix " * 12, "max_tokens": 2, "temperature": 0}
    client.completions.create(**options)
    again = client.completions.create(**options)
    assert again.usage.prompt_tokens_details.cached_tokens >= 64


def test_every_sampling_field_has_a_place_in_the_body() -> None:
    from outrider.server.protocol import OTHER_FORM, CompletionRequest

    assert SamplingParams.__dataclass_fields__.keys() - CompletionRequest.model_fields.keys() <= set(OTHER_FORM)
