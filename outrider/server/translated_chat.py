"""TranslatedChat: runs a chat that came through another API than chat completions. It takes messages and yields the
parser's events, for one sample."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

from outrider.server.chat import logprobs_to_json, prepare_chat
from outrider.server.errors import ApiError
from outrider.server.generation import Change, ChangeReader, Usage, named
from outrider.server.parsers import Content, Event, settled
from outrider.server.protocol import ChatRequest
from outrider.server.service import Service


class ChatPart(NamedTuple):
    events: list[Event]
    logprobs: list[dict[str, Any]]  # of the tokens of the last event, if it is content and the body asks for them


class TranslatedChat:
    def __init__(self, service: Service, body: ChatRequest, names: Mapping[str, str]) -> None:
        """names: the name that this API has for each chat field, used in error messages."""
        self._service, self._body, self._names = service, body, names
        self.model = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._waiting: list[dict[str, Any]] = []  # log-probabilities of tokens that no event has been made of

    async def prepare(self, tenant: str | None) -> None:
        """Check the request and prepare to run it. Raises ApiError if it is refused."""
        try:
            self.model, requests, self._choices = await prepare_chat(self._service, self._body, tenant)
        except ApiError as error:
            raise error.renamed(self._names) from None
        self._requests = requests
        self.usage = Usage(requests)

    async def events(self, request_id: str) -> AsyncGenerator[ChatPart, None]:
        """Yield events. If the chat is streamed they come as they arrive, otherwise all at the end."""
        reader, held = ChangeReader(), list[ChatPart]()
        async with aclosing(self._service.run(self._requests, request_id)) as parts:
            async for i, increments in parts:
                self.usage.update(i, increments)
                for change in reader.read(increments):
                    self.finish_reason, self.stop_reason = change.finish_reason, change.stop_reason
                    events: list[Event] = [Content(change.text)] if change.text else []
                    if self._choices:
                        events = self._choices[0].events(change.text, change.finish_reason is not None)
                    part = ChatPart(events, self._content_logprobs(events, change))
                    if self._body.stream:
                        yield part
                    held.append(part)
        if not self._body.stream:
            logprobs = {id(part.events[-1]): part.logprobs for part in held if part.events}
            for event in settled(event for part in held for event in part.events):
                yield ChatPart([event], logprobs.get(id(event), []))

    def _content_logprobs(self, events: list[Event], change: Change) -> list[dict[str, Any]]:
        """Return the log-probabilities of the content's tokens. A parser does not report the tokens of an event, so
        they are found by length: the last tokens whose texts together are as long as the content. The tokens before
        them are markers, reasoning and calls."""
        if change.logprobs is None:
            return []
        self._waiting += logprobs_to_json(change.token_ids, named(change.logprobs), self._body.top_logprobs or 0)
        if not events:
            return []
        waiting, self._waiting = self._waiting, []
        if not isinstance(events[-1], Content):
            return []
        first, num_characters = len(waiting), len(events[-1].text)
        while first and num_characters > 0:
            first -= 1
            num_characters -= len(waiting[first]["token"])
        return waiting[first:] if self._choices else waiting
