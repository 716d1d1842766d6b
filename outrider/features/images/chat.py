"""chat_prompt: turns a conversation with images, as a user of LLM.chat writes it, into a prompt.

An image is a part of a message: `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`, or
`{"type": "image", "image": ...}` or `{"type": "image_pil", "image_pil": ...}` with any value that `decode.to_rgb`
accepts. URLs other than data URLs are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.fields import shown
from outrider.engine.text import ChatTemplateError, Tokenizer
from outrider.features.images.decode import Rgb, to_rgb
from outrider.features.images.fetch import read_data_url
from outrider.features.images.limits import DEFAULT_LIMITS, DETAILS
from outrider.features.images.literal import LiteralTexts

Message = Mapping[str, Any]


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message], options: Mapping[str, Any]) -> Any:
    """Render a conversation. Returns a prompt with the images, or token ids if there are none. options: keyword
    arguments of `Tokenizer.render_chat`."""
    images, literal = _Images(), LiteralTexts(tokenizer)
    hidden = {name: literal.hide(value) if name != "chat_template" else value for name, value in options.items()}
    written = [literal.hide(images.taken_from(message)) for message in messages]
    text = tokenizer.render_chat(written, **hidden, keeps_parts=True)
    ids = literal.encode(text, add_special_tokens=False)
    if not images.found:
        return ids
    DEFAULT_LIMITS.check_total(sum(image.shape[0] * image.shape[1] for image in images.found))
    details = images.details if any(detail != "auto" for detail in images.details) else None
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images.found},
            "mm_processor_kwargs": None if details is None else {"detail": details}}


class _Images:
    """The images of a conversation, in their order."""

    def __init__(self) -> None:
        self.found: list[Rgb] = []
        self.details: list[str] = []

    def taken_from(self, message: Message) -> Message:
        """Keep the images of a message, and return the message for the chat template: texts joined to one text, or,
        with images, a list of parts without image data."""
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            return message
        parts = [self._part(part) for part in content]
        if any(part["type"] == "image" for part in parts):
            return {**message, "content": parts}
        return {**message, "content": "\n".join(part["text"] for part in parts)}

    def _part(self, part: Any) -> dict[str, str]:
        match part:
            case str() as text:
                return {"type": "text", "text": text}
            case {"type": "text", "text": str() as text}:
                return {"type": "text", "text": text}
            case {"type": "image_url", "image_url": str() as url}:
                return self._add(read_data_url(_data_url(url)))
            case {"type": "image_url", "image_url": {"url": str() as url, **rest}}:
                return self._add(read_data_url(_data_url(url)), str(rest.get("detail") or "auto"))
            case {"type": "image", "image": image} | {"type": "image_pil", "image_pil": image}:
                return self._add(image)
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise ChatTemplateError(f"a part of type {shown(kind)} in a message is not supported: give parts as {{'type': "
                                "'text', 'text': ...}, {'type': 'image_url', 'image_url': {'url': 'data:...'}} or "
                                "{'type': 'image', 'image': ...}")

    def _add(self, image: Any, detail: str = "auto") -> dict[str, str]:
        if detail not in DETAILS:
            raise ValueError(f"the detail of an image must be one of {', '.join(DETAILS)}, got {shown(detail)}")
        (own,) = to_rgb(image)
        self.found.append(own)
        self.details.append(detail)
        return {"type": "image"}


def _data_url(url: str) -> str:
    if not url.startswith("data:"):
        raise ValueError("an image_url must be a data URL (data:image/png;base64,...): nothing is fetched. Read the "
                         "file yourself and give {'type': 'image', 'image': ...}")
    return url
