"""Sends requests that concern several replicas, and joins their answers: metrics, the operator's routes, stored
responses."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

from outrider.replicas.joined_metrics import joined_metrics
from outrider.replicas.replica import Replica, ReplicaState
from outrider.replicas.upstream import Headers, ReplicaLost, ask
from outrider.server.errors import ApiError

ASK_SECONDS = 10.0  # for a replica to answer a question about itself
SLEEP = b"/sleep"
STORED = re.compile(r"/v1/responses/([\w-]+)", re.ASCII)
CONTINUING = ("/v1/responses", "/v1/responses/input_tokens")  # routes whose bodies may name a stored response
JSON_HEADERS: Headers = [(b"content-type", b"application/json")]
TEXT_HEADERS: Headers = [(b"content-type", b"text/plain; charset=utf-8")]


async def ask_whole(replica: Replica, method: str, target: bytes, headers: Headers, body: bytes = b"",
                    seconds: float | None = ASK_SECONDS) -> tuple[int, bytes] | None:
    """Ask one replica, and return the status and the whole body of its answer. None if the replica does not answer in
    time."""
    try:
        async with asyncio.timeout(seconds):
            answer = await ask(replica.socket_path, method, target, headers, body)
            try:
                return answer.status, await answer.body()
            finally:
                answer.close()
    except (ReplicaLost, TimeoutError):
        return None


async def joined_page(replicas: Sequence[Replica], headers: Headers) -> str:
    answers = await asyncio.gather(*(ask_whole(each, "GET", b"/metrics", headers) for each in replicas))
    pages = {each.number: answer[1].decode() for each, answer in zip(replicas, answers, strict=True)
             if answer is not None and answer[0] == 200}
    return joined_metrics(pages, {each.number: each.num_restarts for each in replicas})


def check_all_serve(replicas: Sequence[Replica], outcome: str, *also: ReplicaState) -> None:
    """Raise ApiError unless all replicas serve, because all of them must make the change together. outcome: the text
    that says what was not done. also: further states in which a replica can make the change."""
    absent = [f"replica {each.name} is {each.state.value}" for each in replicas
              if each.state not in (ReplicaState.SERVING, *also)]
    if absent:
        raise ApiError(503, f"{outcome}, because {', '.join(absent)}: ask again when /health says healthy",
                       retry_after=5)


async def ask_all(replicas: Sequence[Replica], method: str, target: bytes, headers: Headers,
                  body: bytes) -> tuple[int, Headers, bytes]:
    """Ask every replica, and join the answers. Raises ApiError if a replica does not answer. Replicas are asked to
    sleep only if all of them serve: otherwise one that restarts would be awake while the others sleep."""
    if target.split(b"?")[0].endswith(SLEEP):
        check_all_serve(replicas, "no replica was asked to sleep")
    answers = await asyncio.gather(*(ask_whole(each, method, target, headers, body, None) for each in replicas))
    found: list[tuple[int, bytes]] = []
    for replica, answer in zip(replicas, answers, strict=True):
        if answer is None:
            raise ApiError(503, f"replica {replica.name} did not answer; the other replicas were asked too: send the "
                                "request again when /health says healthy", retry_after=5)
        found.append(answer)
    return joined_answer(found)


def joined_answer(found: Sequence[tuple[int, bytes]]) -> tuple[int, Headers, bytes]:
    """Join the statuses and bodies of all replicas into one answer. A flag is true if it is true in all; counts are
    summed; of times the longest is taken. If a replica refuses or answers in plain text, the first such answer is
    returned."""
    refusal = next((answer for answer in found if answer[0] != 200), None)
    if refusal is not None:
        return refusal[0], JSON_HEADERS, refusal[1]
    try:
        values = [json.loads(content) for _, content in found]
    except ValueError:
        return 200, TEXT_HEADERS, found[0][1]
    return 200, JSON_HEADERS, json.dumps(_joined(values)).encode()


async def find_response(replicas: Sequence[Replica], path: str, previous: str | None,
                        headers: Headers) -> Replica | None:
    """Find the replica that stored the response which a request names, in its path or as its previous response."""
    named = STORED.match(path)
    response_id = named[1] if named is not None else None
    if path in CONTINUING and previous is not None and re.fullmatch(r"[\w-]+", previous, re.ASCII):
        response_id = previous
    if response_id is None:
        return None
    serving = [each for each in replicas if each.state is ReplicaState.SERVING]
    target = f"/v1/responses/{response_id}".encode()
    found = await asyncio.gather(*(_has(each, target, headers) for each in serving))
    return next((each for each, has in zip(serving, found, strict=True) if has), None)


async def _has(replica: Replica, target: bytes, headers: Headers) -> bool:
    """Whether a replica answers a GET with 200. The body of the answer is not read, because it may be large."""
    try:
        async with asyncio.timeout(ASK_SECONDS):
            answer = await ask(replica.socket_path, "GET", target, headers)
            answer.close()
            return answer.status == 200
    except (ReplicaLost, TimeoutError):
        return False


def _joined(values: list[Any]) -> Any:
    first = values[0]
    match first:
        case bool():
            return all(values)
        case int():
            return sum(values)
        case float():  # seconds that replicas spent at the same time
            return max(values)
        case dict():
            return {key: _joined([value[key] for value in values]) for key in first}
    return first
