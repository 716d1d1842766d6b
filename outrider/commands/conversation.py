"""Conversation: the turns of a chat, with a local model or a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from outrider.core.outputs import RequestOutput


class Conversation(ABC):
    def __init__(self, system: str | None) -> None:
        self._system = [{"role": "system", "content": system}] if system else []
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, str]] = list(self._system)

    def answer(self, text: str, show: Callable[[str], None], priority: int = 0) -> RequestOutput:
        """Add a turn to the conversation. After an interrupt the partial answer is kept; if the question is refused,
        the turn is removed."""
        asked = [*self.messages, {"role": "user", "content": text}]
        output = self._ask(asked, show, priority)
        said = output.outputs[0].text if output.outputs else ""
        self.messages = [*asked, {"role": "assistant", "content": said}]
        return output

    @abstractmethod
    def _ask(self, messages: list[dict[str, str]], show: Callable[[str], None], priority: int) -> RequestOutput:
        """Print the answer while it arrives, and return it. After an interrupt, return the part that has arrived."""
