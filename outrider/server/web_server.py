"""WebServer: uvicorn's server, which tells a user on a terminal the effect of pressing Ctrl-C once or twice."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import uvicorn

from outrider.server.http_protocol import BoundedHttp
from outrider.server.settings import ServerConfig


def web_options(config: ServerConfig, tls: Mapping[str, Any]) -> dict[str, Any]:
    """Return uvicorn's options, which are the same for a server of one engine and for the front of several replicas."""
    return {"http": BoundedHttp, "log_level": config.uvicorn_log_level, "lifespan": "on", "server_header": False,
            "log_config": None, "timeout_graceful_shutdown": int(config.shutdown_timeout),
            "access_log": config.uvicorn_log_level != "warning", **tls}


class WebServer(uvicorn.Server):
    """uvicorn's server. `tell` shows a line to the user who stops the server."""

    def __init__(self, config: uvicorn.Config, tell: Callable[[str], None]) -> None:
        super().__init__(config)
        self._tell = tell

    def stop(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit and self.server_state.tasks:
            self._tell(f"stopping; running requests have {self.config.timeout_graceful_shutdown} s to end (Ctrl-C ends "
                       "them at once)")
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves the application's task to be cancelled then, and logs that as an error
            for task in self.server_state.tasks:  # a front would wait for its replicas, which wait for these requests
                task.cancel()
            await self.lifespan.shutdown()
