"""Conversation: the turns of a chat, with a local model or a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from outrider.core.outputs import RequestOutput


class Conversation(ABC):
    def __init__(self, system: str | None) -> None:
        self._system = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = list(self._system)
        self.images: list[str] = []  # data URLs, for the next question

    def add_image(self, url: str) -> None:
        """Show the model an image with the next question."""
        self.images.append(url)

    def answer(self, text: str, show: Callable[[str], None], priority: int = 0) -> RequestOutput:
        """Add a turn to the conversation. After an interrupt the partial answer is kept; if the question is refused,
        the turn is removed, and so are its images."""
        images, self.images = self.images, []
        asked = [*self.messages, user_message(text, images)]
        output = self._ask(asked, show, priority)
        said = output.outputs[0].text if output.outputs else ""
        self.messages = [*asked, {"role": "assistant", "content": said}]
        return output

    @abstractmethod
    def _ask(self, messages: list[dict[str, Any]], show: Callable[[str], None], priority: int) -> RequestOutput:
        """Print the answer while it arrives, and return it. After an interrupt, return the part that has arrived."""


def user_message(text: str, images: Sequence[str]) -> dict[str, Any]:
    """A user's message, with its images (data URLs) before the text."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}
