"""Prepares a chat's messages for a template, and cuts the rendered text. Imports no Jinja, so that plain prompts start
without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.fields import shown

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """Raised if there is no chat template, or if the template is not valid, refused the messages or exceeded a
    limit."""


def with_plain_content(message: Message, keeps_parts: bool = False) -> Message:
    """Return the message with plain text as its content. Text parts, as in OpenAI's API, are joined by newlines, unless
    the template accepts lists of parts."""
    if not isinstance(message.get("role"), str):
        raise ChatTemplateError("a message needs a 'role' that is a text, such as 'user', got "
                                f"{shown(message.get('role'))} among {', '.join(map(str, message)) or 'nothing'}")
    content = message.get("content")
    if not isinstance(content, list) or keeps_parts:
        return message
    texts = []
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ChatTemplateError(f"a part of type {shown(kind)} in a message is not supported: give parts as "
                                    "{'type': 'text', 'text': ...}")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def up_to_the_end_of(messages: list[Message], rendered: str) -> str:
    """Cut a rendered chat off after the text of its last message, so that the answer continues this message."""
    last = str(messages[-1].get("content") or "").strip() if messages else ""
    end = rendered.rfind(last) + len(last)
    if not last or end < len(last):
        raise ChatTemplateError("continue_final_message: the last message has no text, or the chat template leaves its "
                                "text out: give it text, or leave continue_final_message out")
    return rendered[:end]
