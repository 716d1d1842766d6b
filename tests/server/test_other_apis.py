"""/v1/responses through the official client, and /v1/messages as Anthropic's clients speak it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.rig import MODEL, Served, served_fixture
from tests.server.test_tools import TEXT, say

TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
ARGUMENTS = [{"city": "Köln"}, {}]

served = served_fixture(tool_call_parser="hermes", reasoning_parser="qwen3")
plain = served_fixture()


def test_a_response_and_its_stream(plain: Served) -> None:
    options: dict[str, Any] = {"model": MODEL, "input": "hello", "temperature": 0, "instructions": "Be brief."}
    whole = plain.client().responses.create(max_output_tokens=12, **options)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.output[-1].status == "incomplete"
    assert whole.usage.output_tokens == 12 and whole.output[0].type == "message"
    events = list(plain.client().responses.create(max_output_tokens=12, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added"]
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                          "response.incomplete"]
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == whole.output_text
    plain.assert_idle()


def test_sampling_fields_of_vllm_change_a_response_as_they_change_a_chat(plain: Served) -> None:
    fields: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5}, {"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"logit_bias": {"97": 9}},
        {"stop": "e", "include_stop_str_in_output": True}, {"stop_token_ids": [101]}, {"ignore_eos": True},
        {"structured_outputs": {"regex": "[ab]{30}"}}]
    for more in fields:
        response = plain.post("/v1/responses", input="hello", temperature=0, max_output_tokens=20, **more)
        chat = plain.post("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], temperature=0,
                          max_tokens=20, **more)
        assert response.status_code == chat.status_code, (more, response.text, chat.text)
        if chat.status_code == 200:
            said = response.json()["output"][0]["content"][0]["text"]
            assert said == chat.json()["choices"][0]["message"]["content"], more
    error = plain.error("/v1/responses", input="hello", vllm_xargs={"a": {"b": 1}})
    assert error["param"].startswith("vllm_xargs")


@pytest.mark.parametrize("run", [1, 1000])
def test_a_response_with_reasoning_and_calls(served: Served, run: int) -> None:
    say(served, TEXT, run)
    options: dict[str, Any] = {"model": MODEL, "input": [{"role": "user", "content": "How?"}], "tools": [TOOL]}
    whole = served.client().responses.create(**options)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "I must ask." and whole.output_text == "One moment."
    assert [json.loads(item.arguments) for item in whole.output[2:]] == ARGUMENTS
    with served.client().responses.stream(**options) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output_text == whole.output_text and final.status == "completed"
    items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in whole.output]
    answers = [{"type": "function_call_output", "call_id": item.call_id, "output": "sun"} for item in whole.output[2:]]
    again = served.post("/v1/responses", input=[*options["input"], *items, *answers])
    assert again.status_code == 200, again.text


@pytest.mark.parametrize("run", [1, 1000])
def test_a_message_with_thinking_and_calls(served: Served, run: int) -> None:
    say(served, TEXT, run)
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "system": "Be brief.", "tools": tools,
                            "messages": [{"role": "user", "content": "How?"}]}
    whole = served.post("/v1/messages", **body).json()
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"] and whole["stop_reason"] == "tool_use"
    assert whole["content"][1]["text"] == "One moment." and [b["input"] for b in whole["content"][2:]] == ARGUMENTS
    events = streamed(served, body)
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == kinds and sum(event["type"] == "content_block_stop" for event in events) == 4
    texts = ["".join(e["delta"].get(key, "") for e in events if e["type"] == "content_block_delta")
             for key in ("thinking", "text", "partial_json")]
    assert texts[:2] == ["I must ask.", "One moment."] and json.loads(f"[{texts[2].replace('}{', '},{')}]") == ARGUMENTS
    results = [{"type": "tool_result", "tool_use_id": b["id"], "content": "sun"} for b in whole["content"][2:]]
    body["messages"] += [{"role": "assistant", "content": whole["content"]}, {"role": "user", "content": results}]
    assert served.post("/v1/messages", **body).status_code == 200


@pytest.mark.parametrize("run", [1, 7])
def test_arguments_are_streamed_as_they_come(served: Served, run: int) -> None:
    """In all three APIs; and a call that is cut off is text in an answer that is sent whole."""
    say(served, '<tool_call>{"name": "weather", "arguments": {"city": "Llanfairpwll"}}</tool_call>', run)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "How?"}], "stream": True}
    tools = [{"type": "function", "function": {"name": "weather"}}]
    lines = served.post("/v1/chat/completions", tools=tools, **chat).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    pieces = [call["function"]["arguments"] for call in calls[1:]]
    assert len(pieces) > 2 and json.loads("".join(pieces)) == {"city": "Llanfairpwll"}
    events = list(served.client().responses.create(model=MODEL, input="How?", tools=[TOOL], stream=True))
    assert [event.delta for event in events if event.type.endswith("arguments.delta")] == pieces
    blocks = streamed(served, {"max_tokens": 50, "tools": [{"name": "weather", "input_schema": {}}],
                               "messages": chat["messages"]})
    assert [e["delta"]["partial_json"] for e in blocks if e["type"] == "content_block_delta"] == pieces


def test_a_call_that_is_cut_off(served: Served) -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Llanf'
    say(served, text, 5, "length")
    options: dict[str, Any] = {"model": MODEL, "input": "How?", "tools": [TOOL]}
    assert served.client().responses.create(**options).output_text == text
    (*_, last) = served.client().responses.create(stream=True, **options)
    (call,) = last.response.output
    assert (call.status, call.arguments) == ("incomplete", '{"city": "Llanf')
    body: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": "How?"}],
                            "tools": [{"name": "weather", "input_schema": {}}]}
    assert served.post("/v1/messages", **body).json()["content"] == [{"type": "text", "text": text}]
    assert "".join(e["delta"]["partial_json"] for e in streamed(served, body) if e["type"] == "content_block_delta"
                   ) == '{"city": "Llanf'


def streamed(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = served.post("/v1/messages", stream=True, **body).text
    events = [part.split("\ndata: ") for part in text.strip().split("\n\n")]
    assert all(json.loads(data)["type"] == head.removeprefix("event: ") for head, data in events)
    return [json.loads(data) for _, data in events]


def test_a_message_of_the_model_itself(plain: Served) -> None:
    body: dict[str, Any] = {"max_tokens": 16, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    whole = plain.post("/v1/messages", **body).json()
    assert whole["stop_reason"] == "max_tokens" and whole["usage"]["output_tokens"] == 16
    events = streamed(plain, body)
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert events[-2]["usage"]["output_tokens"] == 16
    stop = whole["content"][0]["text"][3]
    stopped = plain.post("/v1/messages", stop_sequences=[stop], **body).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    plain.assert_idle()


def test_an_answer_goes_on_in_the_last_message_of_the_assistant(plain: Served) -> None:
    body: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    user, begun = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon"}
    whole = plain.post("/v1/messages", messages=[user, begun], **body).json()
    asked = plain.post("/v1/completions", prompt="[user]hi[assistant]Once upon", **body).json()
    assert whole["content"][0]["text"] == asked["choices"][0]["text"]
    counted = plain.post("/v1/messages/count_tokens", messages=[user, begun]).json()["input_tokens"]
    assert counted == asked["usage"]["prompt_tokens"]
    plain.assert_idle()


def test_a_message_that_was_cut_off_behind_a_call_says_so(served: Served) -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n<tool_call>\n{"na'
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    say(served, text, 1000, "length")
    asked = {"max_tokens": 50, "tools": tools, "messages": [{"role": "user", "content": "How?"}]}
    answer = served.post("/v1/messages", **asked).json()
    assert answer["content"][0]["type"] == "tool_use" and answer["stop_reason"] == "max_tokens"


def test_what_they_do_not_do_is_refused_by_name(plain: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        plain.client().responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert plain.error("/v1/responses", input=[])["param"] == "input"
    asked = {"format": {"type": "yaml"}}
    assert "text.format.type" in plain.error("/v1/responses", input="x", text=asked)["message"]
    body = plain.post("/v1/messages", messages=[]).json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == "max_tokens" and body["error"]["message"]
    nameless = {"name": "", "input_schema": {"type": "object"}}
    assert plain.error("/v1/messages", messages=[{"role": "user", "content": "x"}], max_tokens=1,
                       tools=[nameless])["param"] == "tools"
    assert plain.error("/v1/responses", input="x", tools=[{"type": "function", "name": ""}])["param"] == "tools"
    assert plain.post("/v1/messages/other").json()["error"]["type"] == "not_found_error"
    message = {"max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    assert plain.error("/v1/messages", **message, thinking={"type": "deep"})["param"] == "thinking"
    assert plain.error("/v1/responses", input="x", conversation="conv_1")["param"] == "conversation"
    assert plain.error("/v1/messages", **message, tool_choice={"type": "any"})["param"] == "tool_choice"
