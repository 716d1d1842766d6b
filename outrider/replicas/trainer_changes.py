"""TrainerChanges: pauses all replicas and updates the weights of all, when a trainer asks for it over HTTP.

A replica that restarts reads the original files again. After an update it would answer with older weights than the
others, so it gets no requests until the next update. If an update succeeds on only some replicas, the others get no
requests either. A replica that restarts during a pause is paused before it serves.
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
from outrider.server.trainer_routes import FINISH_UPDATE, INIT_TRANSFER, PAUSE, RESUME, START_UPDATE, UPDATE

WholeAnswer = tuple[int, Headers, bytes]
log = logging.getLogger("outrider")


class TrainerChanges:
    def __init__(self) -> None:
        self._pause: tuple[bytes, Headers] | None = None  # the last request that paused all replicas
        self._has_updated = False
        self._behind: set[str] = set()  # names of replicas that may have older weights than the others
        self._updating = asyncio.Lock()  # updates reach all replicas in one order

    async def make(self, replicas: Sequence[Replica], method: str, path: str, target: bytes, headers: Headers,
                   body: bytes) -> WholeAnswer:
        """Carry out a trainer's request on every replica. Raises ApiError if a replica does not serve or answer."""
        match method, path:
            case "POST", found if found in (START_UPDATE, FINISH_UPDATE, INIT_TRANSFER):
                raise ApiError(400, f"{path} needs a server without replicas: POST all weights as one file to {UPDATE}")
            case "POST", found if found == UPDATE:  # replicas carry it out even if the client does not wait for it
                return await asyncio.shield(self._update(replicas, target, headers, body))
            case "POST", found if found == PAUSE:
                return await self._pause_all(replicas, target, headers)
            case "POST", found if found == RESUME:
                return await self._resume_all(replicas, target, headers)
        return await ask_all(replicas, method, target, headers, body)

    async def bring(self, replica: Replica) -> None:
        """Prepare a replica that has started, before it serves: mark its weights as old if the others were updated, and
        pause it if the others are paused."""
        if self._has_updated:
            self._behind.add(replica.name)
            log.error("replica %s has started with the weights of its files, and the others have newer ones: it serves "
                      "after the next update", replica.name)
        if self._pause is not None:
            target, headers = self._pause
            await ask_whole(replica, "POST", target, headers, seconds=None)

    def state_of(self, replica: Replica) -> ReplicaState:
        """The state of a healthy replica: SERVING, or OLD_WEIGHTS if it missed an update and must get no requests."""
        return ReplicaState.OLD_WEIGHTS if replica.name in self._behind else ReplicaState.SERVING

    async def _update(self, replicas: Sequence[Replica], target: bytes, headers: Headers, body: bytes) -> WholeAnswer:
        async with self._updating:
            check_all_serve(replicas, "no weights were changed", ReplicaState.OLD_WEIGHTS)
            before = self._has_updated
            self._has_updated = True  # a replica that restarts from now on may have missed it
            answers = await asyncio.gather(*(ask_whole(each, "POST", target, headers, body, None) for each in replicas))
            refused = [each.name for each, answer in zip(replicas, answers, strict=True)
                       if answer is None or answer[0] != 200]
            if len(refused) == len(replicas):
                self._has_updated = before
                return _refusal(answers)
            self._behind = set(refused)
            for replica in _present(replicas):
                replica.state = self.state_of(replica)
            if refused:
                raise ApiError(503, f"replicas {', '.join(refused)} have not taken the weights and do not serve until "
                                    "the next update, and the others have: send the update again", retry_after=5)
            return 200, JSON_HEADERS, _same_update([json.loads(answer[1]) for answer in answers if answer is not None])

    async def _pause_all(self, replicas: Sequence[Replica], target: bytes, headers: Headers) -> WholeAnswer:
        """Pause all replicas or none: if one refuses, the replicas that this call has paused go on."""
        check_all_serve(replicas, "no replica was paused", ReplicaState.OLD_WEIGHTS)
        before, asked = self._pause, (target, headers)
        self._pause = asked
        try:
            answer = await ask_all(replicas, "POST", target, headers, b"")
        except ApiError:
            answer = None
        if answer is not None and answer[0] == 200:
            return answer
        if self._pause is asked:  # not if it was overtaken by a resume or another pause
            self._pause = before
            if before is None:
                await ask_all(_present(replicas), "POST", RESUME.encode(), headers, b"")
        if answer is None:
            raise ApiError(503, "a replica did not answer, and none is paused: ask again when /health says healthy",
                           retry_after=5)
        return answer

    async def _resume_all(self, replicas: Sequence[Replica], target: bytes, headers: Headers) -> WholeAnswer:
        """Let all replicas continue. If they refuse the client, the pause still holds for replicas that restart."""
        before, self._pause = self._pause, None
        present = _present(replicas)
        if not present:
            raise ApiError(503, "no replica serves: ask again when /health says healthy", retry_after=5)
        answer = await ask_all(present, "POST", target, headers, b"")
        if answer[0] != 200 and self._pause is None:
            self._pause = before
        return answer


def _present(replicas: Sequence[Replica]) -> list[Replica]:
    """Return the replicas whose engine is running, including those with old weights."""
    return [each for each in replicas if each.state in (ReplicaState.SERVING, ReplicaState.OLD_WEIGHTS)]


def _refusal(answers: Sequence[tuple[int, bytes] | None]) -> WholeAnswer:
    given = [answer for answer in answers if answer is not None]
    if not given:
        raise ApiError(503, "no replica answered: ask again when /health says healthy", retry_after=5)
    return joined_answer(given)


def _same_update(found: Sequence[dict[str, object]]) -> bytes:
    """Join the replicas' answers to an update. Each replica counts its weight versions from its own start: if the
    counts differ, the answer lists them all."""
    versions = [answer["weights_version"] for answer in found]
    same = versions[0] if len(set(versions)) == 1 else versions
    return json.dumps(found[0] | {"weights_version": same}).encode()
