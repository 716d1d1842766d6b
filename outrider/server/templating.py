"""Converts messages and tools to the form that chat templates read: message contents as text, arguments of calls as
objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outrider.server.errors import ApiError
from outrider.server.protocol import ChatMessage, TextPart, Tool


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return [_message(message) for message in messages]


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


def _message(message: ChatMessage) -> dict[str, Any]:
    given = message.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
    given["content"] = plain_text(message.content)
    thoughts = message.reasoning or message.reasoning_content
    if thoughts is not None:  # templates read one name or the other
        given["reasoning"] = given["reasoning_content"] = thoughts
    if message.tool_calls:
        given["tool_calls"] = [{"id": call.id, "type": "function", "function": {
            "name": call.function.name, "arguments": _arguments(call.function.arguments)}}
            for call in message.tool_calls]
    return given


def plain_text(content: str | list[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _arguments(text: str) -> Any:
    """The arguments of a tool call as a dict, which each template writes in its model's format."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ApiError(400, "the arguments of a tool call must be a text that holds a JSON object", param="messages")
    return value
