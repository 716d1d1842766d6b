"""RequestLoop: the one loop that drives an engine for callers in its own thread.

Several callers may follow their requests in turn. Whoever asks next steps the engine for all of them; what a step
added to another caller's request is kept until that caller looks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import count
from typing import NamedTuple

from outrider.core.outputs import RequestOutput
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.prompts import EncodedPrompt


class Ask(NamedTuple):
    """One request of a caller."""

    prompt: EncodedPrompt
    params: SamplingParams
    priority: int = 0


class RequestLoop:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = count()
        self._outputs: dict[str, RequestOutput] = {}  # of requests that run, or whose caller has not seen the end
        self._changed: dict[str, None] = {}  # those whose caller has not looked yet

    def add(self, asks: Sequence[Ask]) -> list[str]:
        """Ids of the requests. One that cannot be served raises ValueError before any is started."""
        checked = [self._engine.check(ask.prompt.token_ids, ask.params, priority=ask.priority,
                                      cache_salt=ask.prompt.cache_salt) for ask in asks]
        ids: list[str] = []
        try:
            for ask, request in zip(asks, checked, strict=True):
                request_id = str(next(self._ids))
                self._engine.queue(request_id, request)
                ids.append(request_id)
                self._outputs[request_id] = RequestOutput.empty(request_id, ask.prompt.text, request.token_ids,
                                                                request.params)
        except BaseException:
            self._abort(ids)
            raise
        return ids

    def follow(self, ids: Sequence[str],
               before_step: Callable[[], None] | None = None) -> Generator[RequestOutput, None, None]:
        """The requests' outputs, whenever a step has changed one, until all are finished. They grow in place. Requests
        that still run when the iterator is closed, or fails, are aborted. `before_step` may raise, to end them."""
        left = set(ids)
        try:
            while left:
                if left.isdisjoint(self._changed):
                    if before_step is not None:
                        before_step()
                    self._step()
                for request_id in [i for i in self._changed if i in left]:
                    del self._changed[request_id]
                    output = self._outputs[request_id]
                    if output.finished:
                        left.remove(request_id)
                        del self._outputs[request_id]
                    yield output
        finally:
            self._abort(left)

    def _step(self) -> None:
        for increment in self._engine.step():
            request_id = increment.sample.request_id
            output = self._outputs.get(request_id)
            if output is not None:
                output.grow(increment)
                self._changed[request_id] = None

    def _abort(self, ids: Sequence[str] | set[str]) -> None:
        if not ids:
            return
        for request_id in ids:
            self._engine.abort(request_id)
        self._step()  # their ends
        while self._engine.has_work and not self._engine.has_requests:
            self._step()
        for request_id in ids:
            self._outputs.pop(request_id, None)
            self._changed.pop(request_id, None)
