"""One choice of a chat: turns its parser's events into deltas of a stream, or into one message."""

from __future__ import annotations

import secrets
from typing import Any

from outrider.server.parsers import CallArguments, CallBegin, Content, Event, OutputParser, Reasoning, settled

Delta = dict[str, Any]


class ParsedChoice:
    """Makes the answer of one sample from its text: deltas of a stream, or one message. Reasoning is sent in two fields
    with different names, because each client reads only one of them."""

    def __init__(self, parser: OutputParser, *, includes_reasoning: bool, tool_format: str | None,
                 is_named: bool = False) -> None:
        """is_named: the request names the tool to call, so the text ends with this call."""
        self._parser = parser
        self._includes_reasoning = includes_reasoning
        self._tool_format = tool_format
        self._is_named = is_named
        self._num_calls = 0

    def deltas(self, text: str, is_last: bool) -> list[Delta]:
        return [delta for event in self.events(text, is_last) for delta in self._deltas(event)]

    def message(self, text: str) -> Delta:
        """Return the message for the complete text of a sample."""
        content, thoughts, calls = "", "", []
        for event in settled(self.events(text, is_last=True)):
            match event:
                case Content(said):
                    content += said
                case Reasoning(said):
                    thoughts += said
                case CallBegin():
                    calls.append(self._call(event))
                case CallArguments(said):
                    calls[-1]["function"]["arguments"] += said
        shown = thoughts if self._includes_reasoning else ""
        message = plain_message(content or (None if calls else "")) | _thoughts(shown or None)
        if calls:
            message["tool_calls"] = calls
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._num_calls and not self._is_named else reason

    def events(self, text: str, is_last: bool) -> list[Event]:
        return self._parser.feed(text) + (self._parser.finish() if is_last else [])

    def _deltas(self, event: Event) -> list[Delta]:
        """Convert a parser's event to deltas. The id, type and name of a call are sent once, because clients
        concatenate the strings of all deltas."""
        match event:
            case Content(text):
                return [{"content": text}]
            case Reasoning(text):
                return [_thoughts(text)] if self._includes_reasoning else []
            case CallBegin():
                return [{"tool_calls": [{"index": self._num_calls, **self._call(event)}]}]
            case CallArguments(text):
                return [{"tool_calls": [{"index": self._num_calls - 1, "function": {"arguments": text}}]}]
        return []

    def _call(self, call: CallBegin) -> Delta:
        self._num_calls += 1
        # Mistral's templates take ids of nine letters and digits only.
        own_id = secrets.token_hex(5)[:9] if self._tool_format == "mistral" else f"call_{secrets.token_hex(12)}"
        return {"id": call.call_id or own_id, "type": "function", "function": {"name": call.name, "arguments": ""}}


def plain_message(content: str | None) -> Delta:
    """The assistant's message for text without reasoning or calls. The reasoning fields are null: clients read them in
    every answer."""
    return {"role": "assistant", "content": content, "refusal": None, **_thoughts(None)}


def _thoughts(text: str | None) -> Delta:
    return {"reasoning": text, "reasoning_content": text}
