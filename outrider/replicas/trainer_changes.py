"""TrainerChanges: pauses all replicas and updates the weights of all, when a trainer asks for it over HTTP.

A replica that restarts reads its files again. After an update it would answer with older weights than the others, so it
is kept out until the next update. An update that only some replicas took keeps the others out as well. A replica that
restarts during a pause is paused before it serves.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

from outrider.replicas.all_replicas import JSON_HEADERS, ask_all, ask_whole, check_all_serve, joined_answer
from outrider.replicas.replica import Replica, ReplicaState
from outrider.replicas.upstream import Headers
from outrider.server.errors import ApiError
from outrider.server.trainer_routes import FINISH_UPDATE, PAUSE, RESUME, START_UPDATE, UPDATE

WholeAnswer = tuple[int, Headers, bytes]
log = logging.getLogger("outrider")


class TrainerChanges:
    def __init__(self) -> None:
        self._pause: tuple[bytes, Headers] | None = None  # the last request that paused all replicas
        self._has_updated = False
        self._behind: set[str] = set()  # names of replicas with older weights than the others
        self._lock = asyncio.Lock()  # changes reach all replicas in one order

    async def make(self, replicas: Sequence[Replica], method: str, path: str, target: bytes, headers: Headers,
                   body: bytes) -> WholeAnswer:
        """Carry out a trainer's request on every replica. Raises ApiError if a replica does not serve or answer."""
        match method, path:
            case "POST", found if found in (START_UPDATE, FINISH_UPDATE):
                raise ApiError(400, f"{path} needs a server without replicas: POST all weights as one file to {UPDATE}")
            case "POST", found if found == UPDATE:
                async with self._lock:
                    return await self._update(replicas, target, headers, body)
            case "POST", found if found in (PAUSE, RESUME):
                async with self._lock:
                    return await self._set_pause(replicas, path, target, headers)
        return await ask_all(replicas, method, target, headers, body)

    async def bring(self, replica: Replica) -> None:
        """Prepare a replica that has started, before it serves."""
        async with self._lock:
            if self._has_updated:
                self._behind.add(replica.name)
                log.error("replica %s has started with the weights of its files, and the others have newer ones: it "
                          "serves after the next update", replica.name)
            if self._pause is not None:
                target, headers = self._pause
                await ask_whole(replica, "POST", target, headers, seconds=None)

    def state_of(self, replica: Replica) -> ReplicaState:
        """The state of a replica that is healthy."""
        return ReplicaState.OLD_WEIGHTS if replica.name in self._behind else ReplicaState.SERVING

    async def _update(self, replicas: Sequence[Replica], target: bytes, headers: Headers, body: bytes) -> WholeAnswer:
        check_all_serve(replicas, "no weights were changed", ReplicaState.OLD_WEIGHTS)
        answers = await asyncio.gather(*(ask_whole(each, "POST", target, headers, body, None) for each in replicas))
        given = [(503, b"") if answer is None else answer for answer in answers]
        refused = [each.name for each, answer in zip(replicas, given, strict=True) if answer[0] != 200]
        if len(refused) == len(replicas):
            return joined_answer(given)
        self._has_updated, self._behind = True, set(refused)
        for replica in replicas:
            if replica.state in (ReplicaState.SERVING, ReplicaState.OLD_WEIGHTS):
                replica.state = self.state_of(replica)
        if refused:
            raise ApiError(503, f"replicas {', '.join(refused)} have not taken the weights and do not serve until the "
                                "next update, and the others have: send the update again", retry_after=5)
        return 200, JSON_HEADERS, _same_update([json.loads(content) for _, content in given])

    async def _set_pause(self, replicas: Sequence[Replica], path: str, target: bytes, headers: Headers) -> WholeAnswer:
        if path == PAUSE:
            check_all_serve(replicas, "no replica was paused", ReplicaState.OLD_WEIGHTS)
        paused = (target, headers) if path == PAUSE else None
        answer = await ask_all(replicas, "POST", target, headers, b"")
        if answer[0] == 200:
            self._pause = paused
        return answer


def _same_update(found: Sequence[dict[str, object]]) -> bytes:
    """Join the answers to an update. Replicas count versions from their own start: if the counts differ, all are
    given."""
    versions = [answer["weights_version"] for answer in found]
    same = versions[0] if len(set(versions)) == 1 else versions
    return json.dumps(found[0] | {"weights_version": same}).encode()
