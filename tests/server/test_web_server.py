"""How the web server ends."""

from __future__ import annotations

import asyncio
import tempfile

import uvicorn

from outrider.server.guard import Receive, Scope, Send
from outrider.server.settings import ServerConfig
from outrider.server.web_server import WebServer, web_options


def test_requests_end_before_the_application_when_the_server_is_to_end_at_once() -> None:
    """An application may wait for its requests: the front of replicas waits for replicas, and these for requests."""
    async def test(path: str) -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await receive()
                await send({"type": "lifespan.startup.complete"})
                await receive()
                await ended.wait()
                await send({"type": "lifespan.shutdown.complete"})
                return
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        server = WebServer(uvicorn.Config(app, uds=path, **web_options(ServerConfig(), {})), print)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await begun.wait()
        server.should_exit = server.force_exit = True  # what two SIGINT set
        async with asyncio.timeout(30):
            await serving
        writer.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(test(f"{folder}/x"))
