"""Stored responses: they are retrieved, continued and deleted by the key that made them, within bounds."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import openai
import pytest

from outrider.core.step_messages import TokenLogprobs
from outrider.server import response_store
from outrider.server.choice import ParsedChoice
from outrider.server.errors import ApiError
from outrider.server.generation import Change
from outrider.server.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from outrider.server.protocol import ChatMessage, ChatRequest
from outrider.server.response_store import ResponseStore, StoredItem, StoredResponse
from outrider.server.responses import _item_page
from outrider.server.service import Service
from outrider.server.translated_chat import TranslatedChat
from tests.server.rig import MODEL, Served, served_fixture, serving
from tests.server.test_tools import TEXT, say

TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 6}
LOGPROBS: Any = ["message.output_text.logprobs"]

served = served_fixture(api_key=("one", "two"))
speaking = served_fixture(tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def is_streamed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def respond(client: openai.OpenAI, is_streamed: bool = False, **body: Any) -> Any:
    if not is_streamed:
        return client.responses.create(**ASKED | body)
    *_, last = client.responses.create(stream=True, **ASKED | body)
    return last.response


def test_a_response_is_retrieved_as_it_was_given_until_it_is_deleted(served: Served, is_streamed: bool) -> None:
    client = served.client("one")
    made = respond(client, is_streamed, input="hello", metadata={"a": "b"})
    assert made.store is True
    assert client.responses.retrieve(made.id, include=LOGPROBS) == made
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel,
                 client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="Response with id .* not found"):
            call(made.id)  # type: ignore[operator]


def test_a_conversation_goes_on_as_if_it_were_sent_whole(served: Served, is_streamed: bool) -> None:
    client = served.client("one")
    first = respond(client, is_streamed, input="My name is Ada.", instructions="Never kept.")
    second = respond(client, is_streamed, input=[{"role": "user", "content": "Who?"}], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)  # the conversation is the second one's, too
    third = respond(client, input="And now?", previous_response_id=second.id, instructions="Be brief.")
    items = [{"role": "user", "content": "My name is Ada."}, *(item.model_dump() for item in first.output),
             {"role": "user", "content": "Who?"}, *(item.model_dump() for item in second.output),
             {"role": "user", "content": "And now?"}]
    whole = respond(client, input=items, instructions="Be brief.", store=False)
    assert whole.output_text == third.output_text and whole.usage.input_tokens == third.usage.input_tokens
    counted = client.responses.input_tokens.count(model=MODEL, input="And now?", previous_response_id=second.id,
                                                  instructions="Be brief.")
    assert counted.input_tokens == third.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_calls_and_their_results_go_on_too(speaking: Served) -> None:
    client = speaking.client()
    say(speaking, TEXT, 3)
    first = client.responses.create(model=MODEL, input="How?", tools=[TOOL])
    results: Any = [{"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
                    for item in first.output if item.type == "function_call"]
    say(speaking, "Sunny.", 3)
    second = client.responses.create(model=MODEL, input=results, tools=[TOOL], previous_response_id=first.id)
    assert second.output_text == "Sunny."
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=2))  # the client asks for each page
    assert [item.type for item in listed] == ["message", "reasoning", "message", "function_call", "function_call",
                                              "function_call_output", "function_call_output"]
    assert listed[0].content[0].text == "How?" and [item.id for item in listed[1:5]] == [i.id for i in first.output]
    assert [item.id for item in client.responses.input_items.list(second.id)] == [i.id for i in reversed(listed)]
    again = client.responses.create(model=MODEL, input=[item.model_dump() for item in listed])  # type: ignore[misc]
    assert again.usage.input_tokens == second.usage.input_tokens - speaking.post(
        "/tokenize", prompt="(1 tools)").json()["count"]


def test_another_key_does_not_see_a_response(served: Served) -> None:
    made = respond(served.client("one"), input="secret")
    other = served.client("two")
    for call in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)  # type: ignore[operator]
    with pytest.raises(openai.NotFoundError) as error:
        respond(other, input="x", previous_response_id=made.id)
    assert error.value.param == "previous_response_id"
    assert served.client("one").responses.retrieve(made.id).id == made.id


def test_a_server_may_store_nothing() -> None:
    with serving(max_stored_responses=0) as served:
        made = respond(served.client(), input="x", store=True)
        assert made.store is False
        assert served.http.get(f"/v1/responses/{made.id}").status_code == 404


def test_what_is_not_served_is_refused_by_name(served: Served) -> None:
    http = served.client("one")
    with pytest.raises(openai.BadRequestError, match="background is not supported"):
        respond(http, input="x", background=True)
    made = respond(http, input="x", background=False)
    with pytest.raises(openai.BadRequestError, match="there is no parameter 'stream'"):
        http.responses.retrieve(made.id, stream=True)
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg-none"}):
        with pytest.raises(openai.BadRequestError) as error:
            http.responses.input_items.list(made.id, **wrong)  # type: ignore[arg-type]
        assert error.value.param == next(iter(wrong))
    with pytest.raises(openai.BadRequestError, match="input is missing"):
        http.responses.create(model=MODEL)


def test_log_probabilities_are_those_of_a_chat(served: Served, is_streamed: bool) -> None:
    client = served.client("one")
    made = respond(client, is_streamed, input="hello", include=LOGPROBS, top_logprobs=3)
    chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}], temperature=0,
                                          max_tokens=6, logprobs=True, top_logprobs=3)
    assert chat.choices[0].logprobs is not None
    ours, theirs = made.output[0].content[0].logprobs, chat.choices[0].logprobs.content
    assert [one.model_dump() for one in ours] == [one.model_dump() for one in theirs]
    assert len(ours[0].top_logprobs) == 3
    assert respond(client, input="hello").output[0].content[0].logprobs == []
    if is_streamed:
        events = list(client.responses.create(input="hello", include=LOGPROBS, stream=True, **ASKED))
        given = [one.logprob for event in events if event.type == "response.output_text.delta"
                 for one in event.logprobs]
        assert given == [one.logprob for one in ours]
    with pytest.raises(openai.BadRequestError) as error:
        respond(client, input="x", include=LOGPROBS, top_logprobs=6)
    assert error.value.param == "top_logprobs"


def test_log_probabilities_of_a_parsed_answer_are_those_of_its_text() -> None:
    class Parser:
        def events(self, text: str, is_last: bool) -> list[Event]:
            return {"<think>": [], "so</think>hi": [Reasoning("so"), Content("hi")], " you": [Content(" you")],
                    "<call>": [], "f()": [CallBegin("f"), CallArguments("{}"), CallEnd()], "!": [Content("!")]}[text]

    body = ChatRequest(messages=[ChatMessage(role="user", content="x")])
    chat = TranslatedChat(cast(Service, None), body, {})
    chat._choices = [cast(ParsedChoice, Parser())]
    given = []
    for text, names in [("<think>", ["<think>"]), ("so</think>hi", ["so", "</think>", "h", "i"]), (" you", [" you"]),
                        ("<call>", ["<call>"]), ("f()", ["f", "()"]), ("!", ["!"])]:
        entries = [TokenLogprobs((i,), (-1.0,), 1, (name,)) for i, name in enumerate(names)]
        change = Change(0, text, list(range(len(names))), entries, None, None, [])
        given.append([one["token"] for one in chat._content_logprobs(chat._choices[0].events(text, False), change)])
    assert given == [[], ["h", "i"], [" you"], [], [], ["!"]]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(response_id: str, num_bytes: int = 1) -> StoredResponse:
    return StoredResponse(response_id, b"", (), (StoredItem("a", b"x" * num_bytes),))


def kept(store: ResponseStore, tenant: str, ids: str) -> str:
    found = ""
    for each in ids:
        try:
            found += store.find(tenant, each).id
        except ApiError as error:
            assert error.status == 404
    return found


def test_the_store_is_bounded_in_number_bytes_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_BYTES", 10)
    clock = Clock()
    store = ResponseStore(3, clock)
    store.add("other", stored("z"))
    for each in "abcd":
        store.add("own", stored(each))
    assert kept(store, "own", "abcd") == "bcd" and kept(store, "other", "z") == "z"
    store.add("own", stored("e", 9))
    assert kept(store, "own", "bcde") == "de"
    store.add("own", stored("f", 11))
    assert kept(store, "own", "def") == "de"
    clock.now = response_store.MAX_SECONDS
    store.add("own", stored("g"))
    assert kept(store, "own", "deg") == "eg" and kept(store, "other", "z") == "z"
    clock.now += 1
    assert kept(store, "own", "deg") == "g" and kept(store, "other", "z") == ""


@pytest.mark.parametrize("depth", [100, 500])
def test_a_conversation_goes_on_behind_deep_values(served: Served, depth: int) -> None:
    """Whatever a body may have can be continued: a stored item is read as the body was."""
    summary: list[Any] = []
    for _ in range(depth):
        summary = [summary]
    items = [{"type": "reasoning", "content": [], "summary": summary}, {"role": "user", "content": "x"}]
    client = served.client("one")
    first = respond(client, input=items)
    respond(client, input="y", previous_response_id=first.id)


def test_a_page_of_items_copies_none_of_them() -> None:
    """A client that does not read its answer would hold the copy."""
    items = tuple(StoredItem(str(index), b'{"id":"%d"}' % index) for index in range(3))
    sent: list[bytes] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    asyncio.run(_item_page(items, 2, None)({"type": "http"}, receive, send))
    page = json.loads(b"".join(sent))
    assert page["data"] == [{"id": "0"}, {"id": "1"}] and page["has_more"] is True and page["last_id"] == "1"
    assert [part for part in sent if any(part is item.json for item in items)] == [item.json for item in items[:2]]
