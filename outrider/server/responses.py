"""/v1/responses: OpenAI's newer API over the same chat. Nothing is stored, so a conversation is sent whole each time.

The items of the answer are built by one class, whether they are streamed or returned at the end.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from itertools import count
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from outrider.server.errors import ApiError
from outrider.server.parsers import Call, Content, Event, Reasoning
from outrider.server.protocol import (
    Body,
    ChatMessage,
    ChatRequest,
    Function,
    FunctionCall,
    Generated,
    ResponseFormat,
    Said,
    StreamOptions,
    TextPart,
    Tool,
    ToolCall,
    type_tag,
)
from outrider.server.service import Service, new_id
from outrider.server.translated_chat import TranslatedChat
from outrider.server.work import EventStream, JsonWork, Work, compact

Json = dict[str, Any]


class InputText(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    logprobs: list[Any] | None = None


class InputItem(Body):
    """Fields that items have because an answer had them: nothing depends on them."""

    id: str | None = None
    status: str | None = None


class InputMessage(Said, InputItem):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]


class InputCall(FunctionCall, InputItem):
    type: Literal["function_call"]
    call_id: str


class InputCallOutput(InputItem):
    type: Literal["function_call_output"]
    call_id: str
    output: str


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(InputItem):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[Any] | None = None
    encrypted_content: None = None


Item: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("<message>")] | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")] | Annotated[InputReasoning, Tag("<reasoning>")],
    Discriminator(type_tag, custom_error_type="type",
                  custom_error_message="the type must be message, function_call, function_call_output or reasoning")]


class ResponseTool(Function):
    type: Literal["function"]


class TextFormat(Body):
    """As a chat's response_format, with the schema's fields beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    definition: Json | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def to_chat(self) -> Json:
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.definition}}


class ResponseText(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: str | None = None
    summary: str | None = Field(default=None, description="accepted and not used: reasoning comes as it was written")
    generate_summary: str | None = Field(default=None, description="the old name of summary")


LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(Generated):
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="accepted and not used: a conversation that is too long is refused")
    background: Literal[False] | None = None
    chat_template_kwargs: Json | None = None
    metadata: Json | None = Field(default=None, description="is in the answer, too")
    include: list[str] | None = Field(default=None, description="accepted and not used, except for log-probabilities, "
                                                                "which are refused")
    top_logprobs: int | None = Field(default=None, description="accepted and not used: for log-probabilities that "
                                                               "include asks for")
    stream_options: StreamOptions | None = Field(default=None, description="accepted and not used")
    max_tool_calls: int | None = Field(default=None, description="accepted and not used: for tools that a server runs")

    @property
    def text_format(self) -> TextFormat:
        asked = None if self.text is None else self.text.format
        return TextFormat(type="text") if asked is None else asked


SHARED = ("model", "temperature", "top_p", "tool_choice", "parallel_tool_calls", "seed", "top_k", "min_p",
          "speculative", "priority", "cache_salt", "chat_template_kwargs")


async def create_response(service: Service, body: ResponsesRequest, tenant: str | None) -> Work:
    if LOGPROBS in (body.include or []):
        raise ApiError(400, f"include: {LOGPROBS} is not supported: /v1/chat/completions has log-probabilities",
                       param="include")
    tools = [Tool(type="function", function=Function(name=t.name, description=t.description, parameters=t.parameters))
             for t in body.tools or []]
    chat = ChatRequest(messages=chat_messages(body), tools=tools or None, max_tokens=body.max_output_tokens,
                       response_format=ResponseFormat.model_validate(body.text_format.to_chat()),
                       reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
                       **{name: getattr(body, name) for name in SHARED})
    conversation = TranslatedChat(service, chat, {"max_tokens": "max_output_tokens", "messages": "input",
                                                "response_format": "text"})
    await conversation.prepare(tenant)
    run = _Response(conversation, body)
    timeout = service.deadline(body)
    return EventStream(run.frames(), timeout, end=b"") if body.stream else JsonWork(run.answer(), timeout)


def chat_messages(body: ResponsesRequest) -> list[ChatMessage]:
    """Items become messages; calls and reasoning belong to the assistant's message that follows or holds them."""
    messages = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, ChatMessage(role="user", content=body.input)]
    for item in body.input:
        match item:
            case InputMessage():
                content = item.content if isinstance(item.content, str) else [
                    TextPart(type="text", text=part.text) for part in item.content]
                last = messages[-1] if messages else None
                if item.role == "assistant" and last and last.role == "assistant" and last.content is None:
                    last.content = content
                else:
                    messages.append(ChatMessage(role=item.role, content=content))
            case InputReasoning():
                text = "".join(part.text for part in item.content or [])
                messages.append(ChatMessage(role="assistant", reasoning=text))
            case InputCall():
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage(role="assistant"))
                call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
                messages[-1].tool_calls = [*(messages[-1].tool_calls or []), call]
            case InputCallOutput():
                messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=item.output))
    if not messages:
        raise ApiError(400, "input is an empty list", param="input")
    return messages


class _Response:
    """One request to the route, from its prepared conversation to its answer."""

    def __init__(self, conversation: TranslatedChat, body: ResponsesRequest) -> None:
        self._conversation, self._body = conversation, body
        self._id = new_id("resp")
        self._created = int(time.time())
        self._items = ResponseItems()

    async def answer(self) -> Json:
        async with aclosing(self._changes()) as parts:
            async for _ in parts:
                pass
        return self._response(self._status)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with aclosing(self._changes()) as parts:
            async for changes in parts:
                if not begun:
                    begun = True
                    state = self._response("in_progress") | {"output": []}
                    yield self._framed([("response.created", {"response": state}),
                                        ("response.in_progress", {"response": state})])
                if changes:
                    yield self._framed(changes)
        yield self._framed([(f"response.{self._status}", {"response": self._response(self._status)})])

    async def _changes(self) -> AsyncGenerator[list[tuple[str, Json]], None]:
        async with aclosing(self._conversation.events(self._id)) as parts:
            async for events in parts:
                yield [change for event in events for change in self._items.take(event)]
        yield list(self._items.close(self._status))

    def _framed(self, changes: Iterable[tuple[str, Json]]) -> bytes:
        numbered = [{"type": kind, "sequence_number": self._items.number()} | data for kind, data in changes]
        return b"".join(f"event: {data['type']}\ndata: {compact(data)}\n\n".encode() for data in numbered)

    @property
    def _status(self) -> str:
        return "incomplete" if self._conversation.finish_reason == "length" else "completed"

    def _response(self, status: str) -> Json:
        body = self._body
        usage = self._conversation.usage.to_json() if status != "in_progress" else None
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {}, "model": self._conversation.model, "output": self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "store": False, "temperature": body.temperature, "top_p": body.top_p,
            "text": {"format": body.text_format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice or "auto", "truncation": body.truncation or "disabled",
            "reasoning": None if body.reasoning is None else body.reasoning.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or []], "usage": usage and {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": {"reasoning_tokens": 0}},
        }  # fmt: skip


class ResponseItems:
    """Items of the output, and the changes that a stream tells of them. One item is open at a time."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._numbers = count()
        self._open: Json | None = None
        self._text = ""

    def number(self) -> int:
        return next(self._numbers)

    def take(self, event: Event) -> Iterable[tuple[str, Json]]:
        match event:
            case Content(text):
                yield from self._begin("message", "msg")
                self._text += text
                yield "response.output_text.delta", self._place(0) | {"delta": text, "logprobs": []}
            case Reasoning(text):
                yield from self._begin("reasoning", "rs")
                self._text += text
                yield "response.reasoning_text.delta", self._place(0) | {"delta": text}
            case Call(name, arguments):
                yield from self.close()
                yield from self._call(name, arguments)

    def close(self, status: str = "completed") -> Iterable[tuple[str, Json]]:
        item, self._open = self._open, None
        if item is None:
            return
        place, text, self._text = self._place(0), self._text, ""
        item["status"] = status
        if item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            yield "response.reasoning_text.done", place | {"text": text}
        else:
            item["content"] = [_part(text)]
            yield "response.output_text.done", place | {"text": text, "logprobs": []}
            yield "response.content_part.done", place | {"part": _part(text)}
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _begin(self, kind: str, prefix: str) -> Iterable[tuple[str, Json]]:
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self.close()
        item: Json = {"type": kind, "id": new_id(prefix), "status": "in_progress", "content": []}
        more: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        item |= more
        yield from self._added(item)
        self._open = item
        if kind == "message":
            yield "response.content_part.added", self._place(0) | {"part": _part("")}

    def _call(self, name: str, arguments: str) -> Iterable[tuple[str, Json]]:
        item: Json = {"type": "function_call", "id": new_id("fc"), "call_id": new_id("call"), "name": name,
                      "arguments": "", "status": "in_progress"}
        yield from self._added(item)
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        yield "response.function_call_arguments.delta", place | {"delta": arguments}
        yield "response.function_call_arguments.done", place | {"arguments": arguments, "name": name}
        item |= {"arguments": arguments, "status": "completed"}
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _added(self, item: Json) -> Iterable[tuple[str, Json]]:
        self.items.append(item)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _place(self, content_index: int) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": content_index}


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
