"""Converts messages and tools to the form that chat templates read: message contents as text, arguments of calls as
objects. Contents with images stay lists of parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outrider.server.errors import ApiError
from outrider.server.protocol import ChatMessage, ContentPart, ImagePart, TextPart, Tool


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return [_message(message) for message in with_images_of_tools(messages)]


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


def with_images_of_tools(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Move images from the results of tools, in which templates do not support images, to the user's message that
    follows. If there is none, add one."""
    moved: list[ChatMessage] = []
    waiting: list[ContentPart] = []  # images of the results just before
    for message in messages:
        images = images_of(message)
        if message.role == "tool" and images:
            waiting += images
            message = message.model_copy(update={"content": plain_text(message.content)})
        elif waiting and message.role == "user":
            message = message.model_copy(update={"content": [*waiting, *_parts(message.content)]})
            waiting = []
        elif waiting and message.role != "tool":
            moved.append(ChatMessage(role="user", content=waiting))
            waiting = []
        moved.append(message)
    return [*moved, ChatMessage(role="user", content=waiting)] if waiting else moved


def images_of(message: ChatMessage) -> list[ImagePart]:
    parts = message.content if isinstance(message.content, list) else []
    return [part for part in parts if isinstance(part, ImagePart)]


def _message(message: ChatMessage) -> dict[str, Any]:
    given = message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
    given["content"] = _image_content(message.content) if images_of(message) else plain_text(message.content)
    thoughts = message.reasoning or message.reasoning_content
    if thoughts is not None:  # templates read one name or the other
        given["reasoning"] = given["reasoning_content"] = thoughts
    if message.tool_calls:
        given["tool_calls"] = [{"id": call.id, "type": "function", "function": {
            "name": call.function.name, "arguments": _arguments(call.function.arguments)}}
            for call in message.tool_calls]
    return given


def _image_content(content: Any) -> list[dict[str, str]]:
    """Convert parts to the form that templates read. Texts without an image between them are joined, as in a message
    without images."""
    written: list[dict[str, str]] = []
    for part in content:
        if isinstance(part, ImagePart):
            written.append({"type": "image"})
        elif written and written[-1]["type"] == "text":
            written[-1]["text"] += "\n" + part.text
        else:
            written.append({"type": "text", "text": part.text})
    return written


def _parts(content: str | list[ContentPart] | None) -> list[ContentPart]:
    if isinstance(content, list):
        return content
    return [TextPart(type="text", text=content)] if content else []


def plain_text(content: str | list[ContentPart] | None) -> str:
    """Return the text of a content, without its images."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


def _arguments(text: str) -> Any:
    """Return the arguments of a tool call as a dict, which each template writes in its model's format."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, "the arguments of a tool call must be a text that holds a JSON object", param="messages")
    return value
