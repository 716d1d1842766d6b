"""WebServer: uvicorn's server, for a terminal in which somebody presses Ctrl-C and then presses it again."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import FrameType

import uvicorn


class WebServer(uvicorn.Server):
    """`tell` shows a line to the user who stops the server."""

    def __init__(self, config: uvicorn.Config, tell: Callable[[str], None]) -> None:
        super().__init__(config)
        self._tell = tell

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit and self.server_state.tasks:
            self._tell(f"stopping; running requests have {self.config.timeout_graceful_shutdown} s to end (Ctrl-C ends "
                       "them at once)")
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves the application's task to be cancelled then, and logs that as an error
            await self.lifespan.shutdown()
