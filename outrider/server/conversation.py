"""A chat that another API than OpenAI's chat completions asks for: messages in, events out, one sample."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from outrider.core.outputs import RequestOutput
from outrider.server.chat import prepare_chat
from outrider.server.generation import ChangeReader, Usage
from outrider.server.parsers import Content, Event
from outrider.server.protocol import ChatRequest
from outrider.server.service import Service


class Conversation:
    def __init__(self, service: Service, body: ChatRequest) -> None:
        self._service, self._body = service, body
        self.model = ""
        self.output: RequestOutput | None = None  # the last one that was read

    async def prepare(self, tenant: str | None) -> None:
        """Raises what is wrong with the request."""
        self.model, asks, self._choices = await prepare_chat(self._service, self._body, tenant)
        self._asks = asks
        self.usage = Usage(asks)

    async def events(self, request_id: str) -> AsyncGenerator[list[Event], None]:
        reader = ChangeReader(1)
        async with aclosing(self._service.run(self._asks, request_id)) as outputs:
            async for i, output in outputs:
                self.usage.update(i, output)
                self.output = output
                for change in reader.read(output):
                    if self._choices:
                        yield self._choices[0].events(change.text, change.finish_reason is not None)
                    elif change.text:
                        yield [Content(change.text)]

    @property
    def finish_reason(self) -> str | None:
        return None if self.output is None else self.output.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return None if self.output is None else self.output.outputs[0].stop_reason
