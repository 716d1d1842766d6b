"""A chat that another API than OpenAI's chat completions asks for: messages in, events out, one sample."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from outrider.server.chat import prepare_chat
from outrider.server.errors import ApiError
from outrider.server.generation import ChangeReader, Usage
from outrider.server.parsers import Content, Event
from outrider.server.protocol import ChatRequest
from outrider.server.service import Service


class TranslatedChat:
    def __init__(self, service: Service, body: ChatRequest, names: Mapping[str, str]) -> None:
        """names: the API's own names of fields that have another name in a chat's body."""
        self._service, self._body, self._names = service, body, names
        self.model = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    async def prepare(self, tenant: str | None) -> None:
        """Raises what is wrong with the request."""
        try:
            self.model, requests, self._choices = await prepare_chat(self._service, self._body, tenant)
        except ApiError as error:
            raise error.renamed(self._names) from None
        self._requests = requests
        self.usage = Usage(requests)

    async def events(self, request_id: str) -> AsyncGenerator[list[Event], None]:
        reader = ChangeReader()
        async with aclosing(self._service.run(self._requests, request_id)) as parts:
            async for i, increments in parts:
                self.usage.update(i, increments)
                for change in reader.read(increments):
                    self.finish_reason, self.stop_reason = change.finish_reason, change.stop_reason
                    if self._choices:
                        yield self._choices[0].events(change.text, change.finish_reason is not None)
                    elif change.text:
                        yield [Content(change.text)]
