"""ResponseItems: builds the output of /v1/responses, both for streams and for answers sent at the end."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from outrider.server.parsers import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from outrider.server.service import new_id

Json = dict[str, Any]


class ResponseItems:
    """Builds the output items, and the events of a stream that report changes of the items. At most one item is open at
    a time."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._numbers = count()
        self._open: Json | None = None
        self._text = ""
        self._logprobs: list[Json] = []  # of the open message

    def number(self) -> int:
        return next(self._numbers)

    def take(self, event: Event, logprobs: list[Json]) -> Iterable[tuple[str, Json]]:
        """Add a parser's event. logprobs: log-probabilities of the event's tokens, if it is content and the client
        asked for them."""
        match event:
            case Content(text):
                yield from self._begin("message", "msg")
                self._text += text
                self._logprobs += logprobs
                yield "response.output_text.delta", self._place(0) | {"delta": text, "logprobs": logprobs}
            case Reasoning(text):
                yield from self._begin("reasoning", "rs")
                self._text += text
                yield "response.reasoning_text.delta", self._place(0) | {"delta": text}
            case CallBegin(name, call_id):
                yield from self.close()
                self._open = {"type": "function_call", "id": new_id("fc"), "call_id": call_id or new_id("call"),
                              "name": name, "arguments": "", "status": "in_progress"}
                yield from self._added(self._open)
            case CallArguments(text):
                self._text += text
                yield "response.function_call_arguments.delta", self._item() | {"delta": text}
            case CallEnd(malformed):
                yield from self.close("completed" if malformed is None else "incomplete")

    def close(self, status: str = "completed") -> Iterable[tuple[str, Json]]:
        item, self._open = self._open, None
        if item is None:
            return
        place, text, self._text = self._place(0), self._text, ""
        item["status"] = status
        if item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            yield "response.reasoning_text.done", place | {"text": text}
        elif item["type"] == "function_call":
            item["arguments"] = text
            yield "response.function_call_arguments.done", self._item() | {"arguments": text, "name": item["name"]}
        else:
            logprobs, self._logprobs = self._logprobs, []
            item["content"] = [_part(text, logprobs)]
            yield "response.output_text.done", place | {"text": text, "logprobs": logprobs}
            yield "response.content_part.done", place | {"part": _part(text, logprobs)}
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
            yield "response.content_part.added", self._place(0) | {"part": _part("", [])}

    def _added(self, item: Json) -> Iterable[tuple[str, Json]]:
        self.items.append(item)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _item(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _place(self, content_index: int) -> Json:
        return self._item() | {"content_index": content_index}


def _part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
