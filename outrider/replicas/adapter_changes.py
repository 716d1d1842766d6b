"""AdapterChanges: loads and unloads LoRA adapters on all replicas, when clients ask for it over HTTP.

A change is made only if all replicas serve, and is undone if one of them refuses it. A replica that restarts gets all
changes before it serves.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outrider.replicas.all_replicas import ask_whole, check_all_serve, joined_answer
from outrider.replicas.replica import Replica
from outrider.replicas.upstream import Headers
from outrider.server.admin import LOAD_ADAPTER, UNLOAD_ADAPTER
from outrider.server.errors import ApiError

BODY_HEADERS = (b"content-length", b"content-type", b"transfer-encoding")
log = logging.getLogger("outrider")


class AdapterChange(NamedTuple):
    path: str
    headers: Headers  # of the client, whose key replicas check
    body: dict[str, Any]


class AdapterChanges:
    def __init__(self, modules: Mapping[str, str] | None = None) -> None:
        """modules: folders of the adapters that replicas load at their start, by name."""
        self._modules = dict(modules or {})
        self._last: dict[str, AdapterChange] = {}  # by the adapter's name, in the order of the changes
        self._lock = asyncio.Lock()  # changes reach all replicas in one order

    async def make(self, replicas: Sequence[Replica], path: str, headers: Headers, body: bytes) -> tuple[int, Headers,
                                                                                                        bytes]:
        """Load or unload an adapter on every replica. Raises ApiError if a replica does not serve or answer."""
        check_all_serve(replicas, "no adapter was changed")
        async with self._lock:
            answers = await asyncio.gather(*(ask_whole(each, "POST", path.encode(), headers, body, None)
                                             for each in replicas))
            done = [each for each, answer in zip(replicas, answers, strict=True) if answer and answer[0] == 200]
            if not done:
                found = [answer for answer in answers if answer is not None]
                if not found:
                    raise ApiError(503, "no replica answered, and no adapter was changed: try again when /health says "
                                        "healthy", retry_after=5)
                return joined_answer(found)
            given = json.loads(body)  # replicas have read it
            change = AdapterChange(path, [pair for pair in headers if pair[0] not in BODY_HEADERS], given)
            if len(done) < len(replicas):
                await self._undo(done, change)
                refused = next(answer for answer in answers if answer is None or answer[0] != 200)
                if refused is None:
                    raise ApiError(503, "a replica did not answer, and no adapter was changed: try again when /health "
                                        "says healthy", retry_after=5)
                return joined_answer([refused])
            self._last.pop(given["lora_name"], None)
            self._last[given["lora_name"]] = change
            return joined_answer([answer for answer in answers if answer is not None])

    async def bring(self, replica: Replica) -> None:
        """Repeat all adapter changes on a replica that has restarted, before it serves."""
        async with self._lock:
            for name, change in self._last.items():
                # A name that was given at start too is replaced.
                body = change.body | {"load_inplace": True} if change.path == LOAD_ADAPTER else change.body
                answer = await _ask(replica, change, change.path, body)
                if answer is None or (answer[0] != 200 and change.path == LOAD_ADAPTER):
                    log.error("replica %s serves without the adapter %r: %s", replica.name, name,
                              "it did not answer" if answer is None else answer[1].decode(errors="replace"))

    async def _undo(self, done: Sequence[Replica], change: AdapterChange) -> None:
        """Undo a change on the replicas that made it. If another adapter had the name before, it is loaded again. That
        is impossible for an adapter that was named at start and lies outside the root folder; this is logged."""
        name = change.body["lora_name"]
        before = self._last.get(name)
        if before is None and name in self._modules:
            folder = str(Path(self._modules[name]).resolve())
            before = AdapterChange(LOAD_ADAPTER, change.headers, {"lora_name": name, "lora_path": folder})
        for replica in done:
            if before is not None and before.path == LOAD_ADAPTER:
                answer = await _ask(replica, before, LOAD_ADAPTER, before.body | {"load_inplace": True})
                if answer is None or answer[0] != 200:
                    log.error("replica %s has another adapter %r than the others: %s", replica.name, name,
                              "it did not answer" if answer is None else answer[1].decode(errors="replace"))
            elif change.path == LOAD_ADAPTER:
                await _ask(replica, change, UNLOAD_ADAPTER, {"lora_name": name})


async def _ask(replica: Replica, change: AdapterChange, path: str, content: dict[str, Any]) -> tuple[int, bytes] | None:
    body = json.dumps(content).encode()
    headers = [*change.headers, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return await ask_whole(replica, "POST", path.encode(), headers, body, None)
