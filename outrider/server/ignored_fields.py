"""Lists fields of the body that have no effect in a header of the answer. Otherwise a client would believe that they
work."""

from __future__ import annotations

from collections.abc import Awaitable
from contextvars import ContextVar

from pydantic_core import PydanticCustomError

from outrider.server.guard import IGNORED_HEADER, App, Message, Receive, Scope, Send


class IgnoredFields:
    """The fields of one request's body that have no effect here."""

    def __init__(self, is_strict: bool) -> None:
        self.names: set[str] = set()
        self._is_strict = is_strict

    def add(self, name: str, why: str) -> None:
        """Note a field without effect, or refuse it if the server is strict."""
        if self._is_strict:
            raise PydanticCustomError("refused", "{param} has no effect here, and the server was started with "
                                      "--strict: {why}", {"param": name, "why": why})
        self.names.add(name)


# Outside a request, as in a file of batches, nothing reads the names.
IGNORED: ContextVar[IgnoredFields | None] = ContextVar("ignored fields of the request being served", default=None)


def ignore(name: str, why: str) -> None:
    """Note a field without effect in the body that is being read."""
    fields = IGNORED.get()
    if fields is not None:
        fields.add(name, why)


class IgnoredFieldsHeader:
    """ASGI middleware that adds the header to every answer to a body with ignored fields."""

    def __init__(self, app: App, *, is_strict: bool) -> None:
        self._app, self._is_strict = app, is_strict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = IgnoredFields(self._is_strict)
        IGNORED.set(fields)

        def send_with(message: Message) -> Awaitable[None]:  # no coroutine of its own: it is called for every event
            if message["type"] == "http.response.start" and fields.names:
                value = ", ".join(sorted(fields.names)).encode("ascii")
                message["headers"] = [*message.get("headers", ()), (IGNORED_HEADER.lower().encode("ascii"), value)]
            return send(message)

        await self._app(scope, receive, send_with)
