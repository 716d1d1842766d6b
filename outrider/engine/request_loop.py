"""RequestLoop: runs the steps of an engine for synchronous callers, in the callers' threads.

There may be several callers, also in several threads, of which one at a time uses the engine. A step computes tokens
for the requests of all callers. Outputs for another caller are kept until that caller asks.

An interrupt may land on any line, also during the clean-up after another interrupt. The engine is therefore changed
only while `_is_mid_change` is set. A call that finds the mark already set resets the engine and goes on from the
outputs that callers have. Callers are held by weak references: the next call drops the requests of callers that are
gone."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar, cast

from outrider.core.any_output import Output, empty_output
from outrider.core.checked_request import CheckedRequest
from outrider.core.output_reader import OutputReader
from outrider.core.outputs import RequestOutput
from outrider.engine.engine import Engine

log = logging.getLogger("outrider")
PAUSE_SECONDS = 0.02  # until a caller whose engine is paused looks again
Made = TypeVar("Made")


class Caller:
    """One call of a user. It follows some requests until all have finished or the call ends."""

    def __init__(self, *, only_ends: bool = False) -> None:
        """only_ends: the caller wants an output only when it has finished, which saves handing over every output at
        every step."""
        self.only_ends = only_ends
        self.left: set[str] = set()  # requests that have not finished
        self.readers: dict[str, OutputReader] = {}  # of requests whose outputs are not read whole, as they grow

    def read(self, output: Output) -> Output | None:
        """Return the output in the form that the reader wants, or None if the reader does not want this output yet."""
        reader = self.readers.get(output.request_id)
        if reader is None:
            return output
        return reader.read(output) if reader.is_due(output) else None


@dataclass
class _Followed:
    """A request that runs, or that has ended while its caller has not seen the end."""

    queued: CheckedRequest
    output: Output
    caller: weakref.ref[Caller]

    @property
    def is_wanted(self) -> bool:
        caller = self.caller()
        return caller is not None and self.output.request_id in caller.left


class RequestLoop:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = count()
        self._followed: dict[str, _Followed] = {}
        self._changed: dict[str, None] = {}  # those whose caller has not looked yet
        self._is_mid_change = False  # the engine, or an output, is between two states
        # One thread works at a time. A trace function may raise where `with` ends, before the release: the thread that
        # this happens to can still go on.
        self._lock = threading.RLock()
        self._told: str | None = None  # the last reason to wait that was logged
        self._is_at_work = False  # in `_add` or `_next_of`, or one of them was interrupted

    def add(self, caller: Caller, requests: Sequence[CheckedRequest]) -> list[str]:
        """Start the requests, and return their ids. If the engine refuses one, this raises ValueError and none is
        started."""
        while self._engine.pause.is_coming and not self._engine.has_ended:
            time.sleep(PAUSE_SECONDS)
        with self._lock:
            self._is_at_work = True
            ids = self._add(caller, requests)
            self._is_at_work = False
        return ids

    def _add(self, caller: Caller, requests: Sequence[CheckedRequest]) -> list[str]:
        self._tidy()
        asked = {str(next(self._ids)): request for request in requests}
        caller.left.update(asked)
        self._is_mid_change = True
        try:
            queued = self._engine.add(asked)
        except Exception:  # refused, with nothing changed
            caller.left.difference_update(asked)
            self._is_mid_change = False
            raise
        for request_id, own in queued.items():
            self._followed[request_id] = _Followed(own, empty_output(request_id, own), weakref.ref(caller))
        self._is_mid_change = False
        return list(queued)

    def follow(self, caller: Caller,
               before_step: Callable[[], None] | None = None) -> Generator[Output, None, None]:
        """Yield each output of the caller's requests whenever a step has changed it, until all are finished. The same
        output object grows. If the iterator is closed or fails, requests that still run are aborted, even before the
        first output was asked for. `before_step` may raise an error, to end them."""
        outputs = self._outputs_of(caller, before_step)
        next(outputs)  # a generator that is closed before it has begun would skip its `finally`
        return cast(Generator[Output, None, None], outputs)

    def _outputs_of(self, caller: Caller,
                    before_step: Callable[[], None] | None) -> Generator[Output | None, None, None]:
        """The generator behind `follow`. It yields None once before the outputs, so that `follow` can start it."""
        is_interrupted = False
        try:
            yield None
            while caller.left:
                if before_step is not None and caller.left.isdisjoint(self._changed):
                    before_step()
                if self._must_wait(caller):
                    time.sleep(PAUSE_SECONDS)
                    continue
                with self._lock:
                    self._is_at_work = is_interrupted = True  # if this never becomes False again
                    output = self._next_of(caller)
                    self._is_at_work = is_interrupted = False
                if output is not None and (part := caller.read(output)) is not None:
                    yield part
        finally:
            caller.left.clear()
            # A garbage collection may close the iterator while this very thread is at work in a step: then the next
            # call tidies up.
            if is_interrupted or not self._is_at_work:
                with self._lock:
                    self._tidy()
                    self._is_at_work = False

    def step(self, caller: Caller) -> list[Output]:
        """Return the outputs of the caller's requests that have changed. If none has changed, run one step first."""
        if self._must_wait(caller):
            time.sleep(PAUSE_SECONDS)
            return []
        with self._lock:
            self._is_at_work = True
            if caller.left and caller.left.isdisjoint(self._changed):
                self._step()
            changed = [self._take(caller, request_id) for request_id in list(self._changed)
                       if request_id in caller.left]
            self._is_at_work = False
        return changed

    def step_until(self, end: Callable[[], bool]) -> None:
        """Run steps until `end`, which may change the engine, returns True. Outputs are kept for their callers, and
        other threads may use the engine between two steps."""
        while not self.run(end):
            with self._lock:
                self._is_at_work = True
                self._step()
                self._is_at_work = False

    def run(self, action: Callable[[], Made]) -> Made:
        """Call `action` between two steps of the engine, and return its result. The action may raise an error, but must
        leave the engine in a state from which steps can go on."""
        with self._lock:
            self._is_at_work = True
            self._tidy()
            self._is_mid_change = True
            try:
                made = action()
            except Exception:
                self._is_mid_change = self._is_at_work = False
                raise
            self._is_mid_change = self._is_at_work = False
        return made

    def _must_wait(self, caller: Caller) -> bool:
        """Whether the caller must wait until another thread ends the pause: the engine is paused and has no output for
        the caller."""
        reason = self._engine.pause.reason
        if not reason or self._engine.has_ended or self._engine.has_work or self._is_mid_change:
            return False
        if not caller.left.isdisjoint(self._changed):
            return False
        if reason != self._told:
            log.warning("%s", reason)
            self._told = reason
        return True

    def _next_of(self, caller: Caller) -> Output | None:
        """Return an output of the caller that has changed. If there is none, run a step first; None if that step
        changed none either."""
        request_id = self._first_changed(caller)
        if request_id is None:
            self._step()
            request_id = self._first_changed(caller)
        return None if request_id is None else self._take(caller, request_id)

    def _first_changed(self, caller: Caller) -> str | None:
        for request_id in self._changed:
            if request_id in caller.left:
                return request_id
        return None

    def _take(self, caller: Caller, request_id: str) -> Output:
        """Return a changed output to its caller, and note that the caller has seen the change."""
        output = self._followed[request_id].output
        del self._changed[request_id]
        if output.finished:
            caller.left.remove(request_id)
            del self._followed[request_id]
        return output

    def _step(self) -> None:
        self._tidy()
        self._is_mid_change = True
        self._step_engine()
        self._finish_steps()
        self._is_mid_change = False

    def _step_engine(self) -> None:
        for increment in self._engine.step():
            request_id = increment.sample.request_id
            followed = self._followed.get(request_id)
            if followed is not None:
                followed.output.grow(increment)
                caller = followed.caller()
                if caller is not None and not (caller.only_ends and increment.end is None):
                    self._changed[request_id] = None

    def _finish_steps(self) -> None:
        """Wait for the steps in flight if no request is left. They hold pages, and perhaps no later call would read
        their results."""
        while self._engine.has_work and not self._engine.num_requests:
            self._step_engine()

    # After interrupts, and after callers that have left

    def _tidy(self) -> None:
        """Drop the requests of callers that are gone, and reset the engine if an interrupt has cut off a change. If
        this is interrupted, it can be run again."""
        unwanted = [request_id for request_id, own in self._followed.items() if not own.is_wanted]
        if (unwanted or self._is_mid_change) and not self._engine.has_ended:
            if self._is_mid_change:
                self._rebuild()
            else:
                self._is_mid_change = True
                self._abort(unwanted)
            self._is_mid_change = False
        for request_id in unwanted:
            self._followed.pop(request_id, None)
            self._changed.pop(request_id, None)

    def _abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self._engine.abort(request_id)
        self._step_engine()  # their ends
        self._finish_steps()

    def _rebuild(self) -> None:
        """Reset the engine, and add the requests with readers again, each with the tokens of its output so far."""
        self._engine.reset()
        for request_id, followed in self._followed.items():
            if not followed.is_wanted:
                continue
            output = followed.output
            try:
                for sample, text in self._engine.resume(request_id, followed.queued, output.cut_back()).items():
                    if isinstance(output, RequestOutput):
                        output.outputs[sample].text = text
            except Exception as error:  # its own text fails: the others go on
                output.fail(f"the output failed: {error!r}")
            if output.finished:
                self._changed[request_id] = None
        self._engine.drop_unused()
