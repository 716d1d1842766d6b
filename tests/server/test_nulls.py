"""Habits of clients: nulls for what is not given, answers sent back with all their nulls, fields without effect."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.async_llm import AsyncLLM
from outrider.engine.text import Tokenizer
from outrider.server.app import build_app
from outrider.server.protocol import Body
from tests.server.rig import MODEL, Served, served_fixture, serving, tiny_engine
from tests.server.test_tools import CHAT, TEXT, TOOLS, say

FUNCTION: dict[str, Any] = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
ASKED = [{"role": "user", "content": [{"type": "text", "text": "How?"}]}, {"role": "assistant", "tool_calls": [CALL]},
         {"role": "tool", "tool_call_id": "call_1", "content": "sun"}]
USED = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Köln"}}
GREEDY = {"temperature": 0}
FORM = {"type": "json_schema", "name": "yes", "schema": {"enum": ["yes"]}}
MESSAGES: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief."}], "tools": [{"name": "weather", "input_schema": {}}],
    "tool_choice": {"type": "none"}, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "How?"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": ""}, {"type": "text", "text": "Hm."}, USED]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1",
                                      "content": [{"type": "text", "text": "sun"}]}]}]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", **GREEDY, "max_tokens": 4, "stream": True,
                         "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "a", **GREEDY, "max_tokens": 9, "structured_outputs": {"choice": ["yes"]}}),
    ("/v1/chat/completions", {"messages": ASKED, "tools": [{"type": "function", "function": FUNCTION}],
                              "tool_choice": "none", "max_tokens": 4, **GREEDY}),
    ("/v1/chat/completions", {"messages": CHAT, "tools": TOOLS, "max_tokens": 20, **GREEDY,
                              "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 9, **GREEDY, "response_format": {
        "type": "json_schema", "json_schema": {"name": "yes", "schema": {"enum": ["yes"]}}}}),
    ("/v1/responses", {"max_output_tokens": 9, **GREEDY, "text": {"format": FORM}, "tool_choice": "none",
                       "tools": [{"type": "function", **FUNCTION}], "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "How?"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "sun"}]}),
    ("/v1/messages", {"max_tokens": 4, **GREEDY, **MESSAGES}), ("/v1/messages/count_tokens", MESSAGES),
    ("/v1/embeddings", {"input": ["a", "b"]}), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]}),
    ("/tokenize", {"messages": ASKED, "tools": TOOLS}),
]
DATA = ("parameters", "schema", "input_schema", "input")  # objects of the client's own, in which a null is a value

served = served_fixture(lambda: AsyncLLM.around(tiny_engine(eos_ids=(2,)).engine))


@pytest.fixture(scope="module")
def speaking() -> Iterator[Served]:
    """With a model that reasons, writes and calls, as a test tells it to."""
    with serving(tool_call_parser="hermes", reasoning_parser="qwen3") as served:
        yield served


def answer(served: Served, path: str, body: dict[str, Any]) -> Any:
    """The part of the answer that is the same each time."""
    got = served.post(path, **body)
    assert got.status_code == 200, (path, body, got.text)
    if not body.get("stream"):
        return without_ids(got.json())
    events = [json.loads(line.removeprefix("data: ")) for line in got.text.split("\n") if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    changing = ("id", "call_id", "created", "created_at", "metadata", "metrics", "usage")
    return value if not isinstance(value, dict) else {
        name: without_ids(each) for name, each in value.items() if name not in changing}


def objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, list) or (isinstance(each, dict) and name not in DATA):
            yield from objects(each)


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_null_field_changes_nothing_wherever_it_is(served: Served, path: str, body: dict[str, Any]) -> None:
    plain = answer(served, path, body)
    for i in range(len(list(objects(body)))):
        more = copy.deepcopy(body)
        place = list(objects(more))[i]
        place |= {"colour": None, "function_call": None, "namespace": None, "logprobs": None}
        assert answer(served, path, more) == plain, (i, more)
    served.assert_idle()


def test_every_object_of_every_body_follows_the_rule(served: Served) -> None:
    kinds = [Body]
    for kind in kinds:
        kinds += kind.__subclasses__()
        assert kind.leave_out_unused({"colour": None}) == {}
    posts = {path: route["post"] for path, route in build_app(served.service).openapi()["paths"].items()
             if "requestBody" in route.get("post", {})}
    assert {path for path, _ in BODIES} <= posts.keys()
    posts.pop("/invocations", None)  # whose body is read as that of another route
    names = {post["requestBody"]["content"]["application/json"]["schema"]["$ref"] for post in posts.values()}
    assert names <= {f"#/components/schemas/{kind.__name__}" for kind in kinds}


def test_messages_of_the_client_come_back_as_they_were_dumped(speaking: Served) -> None:
    say(speaking, TEXT, 7)
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": TOOLS}
    client = speaking.client()
    whole = client.chat.completions.create(**options).choices[0].message
    with client.chat.completions.stream(**options) as stream:
        streamed = stream.get_final_completion().choices[0].message
    say(speaking, "<think>I must ask.</think>One moment.", 7)
    without_calls = client.chat.completions.create(**options).choices[0].message
    for message in (whole, streamed, without_calls):
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls or []]
        assert None in message.model_dump().values() and message.model_dump()["reasoning"] == "I must ask."
        messages = [*CHAT, message.model_dump(), *results]
        again = client.chat.completions.create(**options | {"messages": messages})
        assert again.choices[0].message.content == "One moment."
        kept = {"role", "content", "tool_calls", "reasoning"}
        fewer = [*CHAT, message.model_dump(include=kept, exclude_none=True), *results]
        tokens = [speaking.post("/tokenize", messages=given).json()["tokens"] for given in (messages, fewer)]
        assert tokens[0] == tokens[1]


def test_output_items_of_the_client_come_back_as_they_were_dumped(speaking: Served) -> None:
    say(speaking, TEXT, 7)
    asked = [{"role": "user", "content": "How?"}]
    options: dict[str, Any] = {"model": MODEL, "input": asked, "tools": [{"type": "function", **FUNCTION}]}
    client = speaking.client()
    with client.responses.stream(**options) as stream:
        streamed = stream.get_final_response().output
    for output in (client.responses.create(**options).output, streamed):
        items = [item.model_dump() for item in output]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
        assert all(None in item.values() for item in items)
        results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "sun", "status": None}
                   for item in items[2:]]
        again = client.responses.create(**options | {"input": [*asked, *items, *results]})
        assert again.output_text == "One moment."


def test_blocks_of_anthropics_client_come_back_as_they_were_dumped(speaking: Served) -> None:
    """The client fills in the fields that the server did not send."""
    say(speaking, TEXT, 7)
    body: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": "How?"}],
                            "tools": [{"name": "weather", "input_schema": {}, "cache_control": None, "type": None}]}
    whole = speaking.post("/v1/messages", **body).json()
    nulls: dict[str, dict[str, Any]] = {
        "text": {"citations": None, "parsed_output": None}, "thinking": {},
        "tool_use": {"caller": {"type": "direct"}, "toolset_name": None}}
    blocks = [nulls[block["type"]] | block for block in whole["content"]]
    assert len(blocks) == 4
    results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "sun", "is_error": None,
                "cache_control": {"type": "ephemeral"}} for block in blocks[2:]]
    more = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    again = speaking.post("/v1/messages", **body | {"messages": body["messages"] + more})
    assert again.status_code == 200 and again.json()["content"][1]["text"] == "One moment."


SWITCHES = "{{ messages[0].content }} {{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "How?"}], "max_tokens": 1}
INPUT: dict[str, Any] = {"input": "How?", "max_output_tokens": 1}


@pytest.mark.parametrize(("path", "body", "prompt"), [
    ("/v1/chat/completions", ASK, "How?   "),
    ("/v1/chat/completions", ASK | {"reasoning_effort": "low"}, "How? low True True"),
    ("/v1/chat/completions", ASK | {"reasoning_effort": "none"}, "How? none False False"),
    ("/v1/chat/completions", ASK | {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}},
     "How? low True False"),
    ("/v1/responses", INPUT | {"reasoning": {"effort": "high", "summary": "auto"}}, "How? high True True"),
    ("/v1/responses", INPUT | {"reasoning": {"summary": "auto"}}, "How?   "),
    ("/v1/messages", ASK | {"thinking": {"type": "enabled", "budget_tokens": 2048}}, "How? medium True True"),
    ("/v1/messages", ASK | {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
     "How? high True True"),
    ("/v1/messages", ASK | {"thinking": {"type": "disabled"}}, "How? none False False"),
])
def test_reasoning_is_asked_for_by_the_templates_own_switch(served: Served, monkeypatch: pytest.MonkeyPatch, path: str,
                                                            body: dict[str, Any], prompt: str) -> None:
    texts: list[str] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda own, text, add: [texts.append(text), encode(own, text, add)][1])
    hints = {name: value for name, value in body.items() if name != "chat_template_kwargs"}
    assert served.post(path, **hints).status_code == 200, "the model's template has no switch"
    monkeypatch.setattr(served.service, "_chat_template", SWITCHES)
    assert served.post(path, **body).status_code == 200
    assert texts == ["[user]How?[assistant]", prompt]


def test_options_of_the_other_apis(served: Served) -> None:
    hints = {"truncation": "auto", "include": ["reasoning.encrypted_content"], "max_tool_calls": 3, "top_logprobs": 2,
             "stream_options": {"include_obfuscation": False}, "metadata": {"run": "7"}, "text": {"verbosity": "low"}}
    plain, hinted = (answer(served, "/v1/responses", INPUT | GREEDY | more) for more in ({}, hints))
    assert hinted["output"] == plain["output"]
    assert served.post("/v1/responses", **INPUT, **hints).json()["metadata"] == {"run": "7"}
    assert served.post("/v1/responses", **INPUT, **hints, stream=True).status_code == 200
    form = {"type": "json_schema", "schema": {"enum": ["yes"]}}
    for more in ({"output_format": form}, {"output_config": {"format": form}}):
        said = answer(served, "/v1/messages", ASK | {"max_tokens": 9} | more)
        assert said["content"][0]["text"] == '"yes"'
    asked = {"type": "json_schema", "schema": {"type": "colour"}}
    for field, wrong in (("output_format", asked), ("output_config", {"format": asked})):
        assert served.error("/v1/messages", **ASK, **{field: wrong})["param"] == field
    error = served.error("/v1/messages", **ASK, output_format=form, output_config={"format": form})
    assert "give one of them" in error["message"]


@pytest.mark.parametrize(("path", "body", "words"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": 1}]}]},
     "no field 'messages.0.content.0.txt'"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
     "messages.0.content.0.text: Input should be a valid string"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: Input"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "audio": {"id": "x"}}]},
     "messages.0: audio is not supported"),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f", "x": 1}}]},
     "no field 'tools.0.function.x'"),
    ("/v1/chat/completions", {"mesages": CHAT}, "no field 'mesages': did you mean messages?"),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "x": 1}]},
     "no field 'input.0.x'"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
     "input.0.content.0.text: Input should be a valid string"),
    ("/v1/responses", {"input": [{"role": "user"}]}, "input.0.content: Field required"),
    ("/v1/responses", {"input": [{"type": "web_search_call"}]}, "input.0: the type must be message, function_call"),
    ("/v1/responses", {"input": [{"type": ["message"]}]}, "input.0: the type must be"),
    ("/v1/responses", {"input": ["a"]}, "input.0: the type must be"),
    ("/v1/messages", {"max_tokens": 1, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "no field 'messages.0.content.0.x'"),
    ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"text": "a"}]}]},
     "messages.0.content.0: the type must be text, image, thinking"),
    ("/v1/completions", {"prompt": [[1, "a"]]}, "prompt.0.1: Input should be a valid integer"),
    ("/v1/completions", {"prompt": None}, "give either prompt or prompt_embeds"),
])
def test_an_error_inside_a_union_names_the_field(served: Served, path: str, body: dict[str, Any], words: str) -> None:
    assert words in served.error(path, **body)["message"]
