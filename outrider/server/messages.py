"""/v1/messages: Anthropic's API, served by the same code as chat completions, streamed or whole. Its errors have this
server's common form."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from outrider.server.bodies import beside_loop
from outrider.server.chat_prompts import ChatInput
from outrider.server.errors import ApiError
from outrider.server.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from outrider.server.protocol import (
    MAX_TOOLS,
    Body,
    ChatMessage,
    ChatRequest,
    ContentPart,
    Function,
    FunctionCall,
    ImagePart,
    JsonSchema,
    RequestBody,
    ResponseFormat,
    Said,
    TextPart,
    Tool,
    ToolCall,
    ToolName,
    type_tag,
)
from outrider.server.service import Service, new_id
from outrider.server.translated_chat import TranslatedChat
from outrider.server.work import EventStream, JsonWork, Work, compact

Json = dict[str, Any]


class TextBlock(Body):
    type: Literal["text"]
    text: str


class Base64Source(Body):
    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[\w.+-]{1,64}$")]
    data: str


class UrlSource(Body):
    type: Literal["url"]
    url: str


class ImageBlock(Body):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
        Discriminator(type_tag, custom_error_type="type", custom_error_message="the type must be base64 or url")]

    def to_chat(self) -> ImagePart:
        if isinstance(self.source, UrlSource):
            return ImagePart.from_url(self.source.url)
        data, self.source.data = self.source.data, ""  # the message has it from now on
        return ImagePart.from_url(f"data:{self.source.media_type};base64,{data}")


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class UseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


ResultContent: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")],
    Discriminator(type_tag, custom_error_type="type", custom_error_message="the type must be text or image")]


class ResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultContent], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


Block: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[UseBlock, Tag("<tool_use>")] | Annotated[ResultBlock, Tag("<tool_result>")],
    Discriminator(type_tag, custom_error_type="type",
                  custom_error_message="the type must be text, image, thinking, tool_use or tool_result")]


class Message(Said):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class MessageTool(Body):
    name: ToolName
    description: str | None = None
    input_schema: Json
    type: Literal["custom"] | None = None


class MessageToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def check_name(self) -> MessageToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("name", "name is for the type tool: use it, or leave name out", {})
        return self

    def to_chat(self) -> str | Json:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    definition: Json = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class MessagesPrompt(RequestBody):
    """The fields of a /v1/messages body that become the prompt. They also say how the answer is constrained, which does
    not matter for `count_tokens`."""

    model: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[MessageTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    @property
    def reasoning_effort(self) -> str | None:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        effort = None if self.output_config is None else self.output_config.effort
        return effort or (None if self.thinking is None else "medium")

    @property
    def response_format(self) -> ResponseFormat | None:
        newer = None if self.output_config is None else self.output_config.format
        if newer is not None and self.output_format is not None:
            raise ApiError(400, "output_format and output_config.format say the same thing: give one of them",
                           param="output_format")
        form = newer or self.output_format
        return None if form is None else ResponseFormat(type="json_schema",
                                                        json_schema=JsonSchema(schema=form.definition))


class MessagesRequest(MessagesPrompt):
    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None


async def count_tokens(service: Service, body: MessagesPrompt, tenant: str | None) -> int:
    """Count the tokens of the prompt that is made from the messages."""
    service.check_model(body.model)
    tools = None if body.tool_choice is not None and body.tool_choice.type == "none" else _tools(body)
    messages = await beside_loop(lambda: chat_messages(body))
    chat = ChatInput(messages, tools, continue_final_message=continues_last(messages),
                        reasoning_effort=body.reasoning_effort)
    return len(await service.count_chat(chat, tenant))


def _tools(body: MessagesPrompt) -> list[Tool]:
    return [Tool(type="function", function=Function(name=tool.name, description=tool.description,
                                                    parameters=tool.input_schema)) for tool in body.tools or []]


async def create_message(service: Service, body: MessagesRequest, tenant: str | None) -> Work:
    chat = await beside_loop(lambda: _chat(body))
    form = "output_config" if body.output_format is None else "output_format"
    conversation = TranslatedChat(service, chat, {"stop": "stop_sequences", "response_format": form})
    await conversation.prepare(tenant)
    run = _Message(conversation, body)
    timeout = service.config.request_timeout
    if not body.stream:
        return JsonWork(run.answer(), timeout)
    return EventStream(run.frames(), timeout, end=b"", error_event=error_event)


def _chat(body: MessagesRequest) -> ChatRequest:
    choice, messages = body.tool_choice, chat_messages(body)
    return ChatRequest(model=body.model, messages=messages, tools=_tools(body) or None, top_p=body.top_p,
                       top_k=body.top_k, temperature=body.temperature, max_tokens=body.max_tokens,
                       continue_final_message=continues_last(messages), reasoning_effort=body.reasoning_effort,
                       response_format=body.response_format, stream=body.stream,
                       stop=body.stop_sequences or None, tool_choice=None if choice is None else choice.to_chat(),
                       parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use)


def chat_messages(body: MessagesPrompt) -> list[ChatMessage]:
    if not body.messages:
        raise ApiError(400, "messages is an empty list: give at least one", param="messages")
    messages = [ChatMessage(role="system", content=_text(body.system))] if body.system else []
    for message in body.messages:
        messages += [ChatMessage(role=message.role, content=message.content)] if isinstance(message.content, str) else (
            _messages(message.role, message.content))
    return messages


def continues_last(messages: list[ChatMessage]) -> bool:
    """Whether the answer continues the last message, which must then be the assistant's."""
    last = messages[-1]
    return last.role == "assistant" and bool(last.content) and not last.tool_calls


def _messages(role: Literal["user", "assistant"], blocks: list[Block]) -> list[ChatMessage]:
    """Convert the content blocks of one message to chat messages. Results of tools become separate messages before the
    user's text."""
    results = [ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=_content(block.content or []))
               for block in blocks if isinstance(block, ResultBlock)]
    content = _content(blocks)
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=json.dumps(block.input)))
             for block in blocks if isinstance(block, UseBlock)]
    if results and not (content or calls):
        return results
    return [*results, ChatMessage(role=role, content=content, reasoning=thoughts or None, tool_calls=calls or None)]


def _content(blocks: str | Sequence[Block]) -> str | list[ContentPart]:
    """Convert content blocks to their texts and images. Without images the result is one text."""
    if isinstance(blocks, str):
        return blocks
    if not any(isinstance(block, ImageBlock) for block in blocks):
        return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    return [block.to_chat() if isinstance(block, ImageBlock) else TextPart(type="text", text=block.text)
            for block in blocks if isinstance(block, ImageBlock | TextBlock)]


def _text(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or [])


class _Message:
    """One request to /v1/messages: runs it and makes the answer from the parser's events, streamed or whole."""

    def __init__(self, conversation: TranslatedChat, body: MessagesRequest) -> None:
        self._conversation, self._body = conversation, body
        self._id = new_id("msg")
        self._blocks = ContentBlocks()

    async def answer(self) -> Json:
        async with aclosing(self._changes()) as changes:
            async for _ in changes:
                pass
        return self._message(self._blocks.blocks) | self._end() | {"usage": self._usage()}

    async def frames(self) -> AsyncGenerator[bytes, None]:
        begun = False
        async with aclosing(self._changes()) as parts:
            async for changes in parts:
                if not begun:
                    begun = True
                    usage = self._usage() | {"output_tokens": 0}
                    yield _framed([("message_start", {"message": self._message([]) | {"usage": usage}})])
                if changes:
                    yield _framed(changes)
        yield _framed([("message_delta", {"delta": self._end(), "usage": self._usage()}), ("message_stop", {})])

    async def _changes(self) -> AsyncGenerator[list[tuple[str, Json]], None]:
        async with aclosing(self._conversation.events(self._id)) as parts:
            async for events, _ in parts:
                yield [change for event in events for change in self._blocks.take(event)]
        yield list(self._blocks.close())

    def _message(self, content: list[Json]) -> Json:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._conversation.model,
                "content": content, "stop_reason": None, "stop_sequence": None}

    def _end(self) -> Json:
        stop = self._conversation.stop_reason
        if self._conversation.finish_reason == "length":  # behind a call that is whole another may be cut off
            reason = "max_tokens"
        elif self._blocks.has_calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if isinstance(stop, str) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}

    def _usage(self) -> Json:
        usage = self._conversation.usage.to_json()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"]}


class ContentBlocks:
    """Builds the content blocks of the answer, and the events of a stream that report changes of the blocks. One block
    is open at a time."""

    KEYS = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}

    def __init__(self) -> None:
        self.blocks: list[Json] = []
        self.has_calls = False
        self._is_open = False
        self._arguments = ""  # of the call that is open

    def take(self, event: Event) -> Iterable[tuple[str, Json]]:
        match event:
            case Content(text):
                yield from self._grow("text", text)
            case Reasoning(text):
                yield from self._grow("thinking", text)
            case CallBegin(name, call_id):
                self.has_calls, self._arguments = True, ""
                yield from self.close()
                yield self._started({"type": "tool_use", "id": call_id or new_id("toolu"), "name": name, "input": {}})
            case CallArguments(text):
                self._arguments += text
                delta = {"type": "input_json_delta", "partial_json": text}
                yield "content_block_delta", {"index": len(self.blocks) - 1, "delta": delta}
            case CallEnd(malformed):
                if malformed is None:
                    self.blocks[-1] = self.blocks[-1] | {"input": json.loads(self._arguments)}
                yield from self.close()

    def close(self) -> Iterable[tuple[str, Json]]:
        if self._is_open:
            self._is_open = False
            yield "content_block_stop", {"index": len(self.blocks) - 1}

    def _grow(self, kind: str, text: str) -> Iterable[tuple[str, Json]]:
        key, delta = self.KEYS[kind]
        if not self._is_open or self.blocks[-1]["type"] != kind:
            yield from self.close()
            yield self._started({"type": kind, key: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self.blocks[-1][key] += text
        yield "content_block_delta", {"index": len(self.blocks) - 1, "delta": {"type": delta, key: text}}

    def _started(self, block: Json) -> tuple[str, Json]:
        self.blocks.append(block)
        self._is_open = True
        return "content_block_start", {"index": len(self.blocks) - 1, "content_block": dict(block)}


def error_event(error: ApiError) -> bytes:
    """Write an error as an event of a stream. It has an event name, because clients of this API ignore events without
    one."""
    return _framed([("error", error.body_for("/v1/messages"))])


def _framed(changes: Iterable[tuple[str, Json]]) -> bytes:
    return b"".join(f"event: {kind}\ndata: {compact({'type': kind} | data)}\n\n".encode() for kind, data in changes)
