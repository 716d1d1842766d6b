"""Tools and reasoning in chats, through the official client, with a model that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest

from outrider.core.checked_request import CheckedRequest
from outrider.core.outputs import OutputIncrement, RequestMetrics, SampleEnd, SampleKey
from tests.server.rig import MODEL, Served, served_fixture

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]
CHAT: list[Any] = [{"role": "user", "content": "How is the weather?"}]
TEXT = ('<think>\nI must ask.\n</think>\n\nOne moment.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}'
        '\n</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>')

served = served_fixture(tool_call_parser="hermes", reasoning_parser="qwen3")


def say(served: Served, text: str, run: int, finish_reason: str = "stop") -> None:
    """The model answers with the text, in runs of so many characters."""

    async def increments(request: CheckedRequest, request_id: str) -> AsyncGenerator[list[OutputIncrement], None]:
        assert request.sampling.skip_special_tokens is False
        metrics = RequestMetrics()
        for start in range(0, len(text), run):
            end = SampleEnd(finish_reason) if start + run >= len(text) else None
            yield [OutputIncrement(SampleKey(request_id, i, 0, metrics), [1], text[start:start + run], end=end)
                   for i in range(request.num_samples)]

    served.llm.increments = increments  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("run", [1, 7, 1000])
def test_calls_and_reasoning_whole_and_streamed(served: Served, run: int) -> None:
    say(served, TEXT, run)
    client = served.client()
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "n": 2}
    whole = client.chat.completions.create(**options)
    for choice in whole.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content == "One moment."
        assert choice.message.reasoning == choice.message.reasoning_content == "I must ask."  # type: ignore[attr-defined]
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Köln"}, {}]
    with client.chat.completions.stream(**options) as stream:
        thoughts = ["", ""]
        for chosen in (event.chunk.choices[0] for event in stream if event.type == "chunk"):
            thoughts[chosen.index] += getattr(chosen.delta, "reasoning", "")
        final = stream.get_final_completion()
    assert thoughts == ["I must ask."] * 2
    for streamed, choice in zip(final.choices, whole.choices, strict=True):
        assert streamed.finish_reason == "tool_calls" and streamed.message.content == choice.message.content
        names = [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls]
        assert names == [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert len({call.id for call in streamed.message.tool_calls}) == 2


def test_an_answer_without_calls_and_without_its_reasoning(served: Served) -> None:
    say(served, "<think>hm</think>Fine.", 3)
    for more in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        answer = served.client().chat.completions.create(model=MODEL, messages=CHAT, **more,
                                                         extra_body={"include_reasoning": False})
        message = answer.choices[0].message
        assert message.content == "Fine." and message.tool_calls is None and message.reasoning is None
        assert answer.choices[0].finish_reason == "stop"


def test_calls_of_earlier_messages_reach_the_template(served: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]}]
    tokens = served.post("/tokenize", messages=messages).json()["tokens"]
    assert bytes(tokens).endswith(b"[assistant][tool]sunny[assistant]")
    call["function"]["arguments"] = "[1]"  # type: ignore[index]
    assert "JSON object" in served.error("/tokenize", messages=messages)["message"]


def test_forced_calls_need_a_model_that_can_end(served: Served) -> None:
    """Calls are forced by a grammar, and this model has no end token. `test_forms.py` has one that does."""
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        with pytest.raises(openai.BadRequestError, match="no end token"):
            served.client().chat.completions.create(model=MODEL, messages=CHAT, tools=TOOLS, tool_choice=choice)
