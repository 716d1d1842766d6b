"""Maintenance: changes the worker's memory under a running engine: puts it to sleep, wakes it up and replaces weights.

Before memory changes, the engine comes to rest: the steps in flight end, running requests are preempted, and the cache
is emptied. These requests, and those that arrive meanwhile, wait and go on from their tokens when weights and cache are
back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.core.fields import shown
from outrider.core.lazy_exports import LateModule
from outrider.engine.engine import Engine
from outrider.engine.pause import Pause, PauseMode, PauseWait
from outrider.feature_list import drop_session
from outrider.runner.commands import (
    PARTS,
    WEIGHTS,
    ChecksumWeights,
    FinishStream,
    NamedArray,
    NamedTensor,
    Sleep,
    SleepReport,
    StreamWeight,
    UpdateReport,
    UpdateWeights,
    WakeReport,
    WakeUp,
    WeightsIncomplete,
)
from outrider.runner.interface import WorkerDied

if TYPE_CHECKING:
    from outrider.core.weights_checksum import WeightsChecksum
    from outrider.engine import named_weights
    from outrider.runner import profiling
else:
    named_weights = LateModule("outrider.engine.named_weights")
    profiling = LateModule("outrider.runner.profiling")

LEVELS = (1, 2)
PAUSED = "the engine is paused: requests wait for resume_generation"
RESUMED = "resume_generation was called before all requests had ended"
OVERTAKEN = "another call paused the engine before all requests had ended"
ASLEEP = "the engine sleeps: requests wait for wake_up"
UPDATING = "an update of weights was interrupted: requests wait for an update with all weights"
IN_SESSION = "an update of weights is in progress: finish_weight_update() ends it"
LOADING = "a call of load_weights goes on, in which weights change: wait for its end"
SLEPT = "an update of weights had begun when the engine went to sleep"
STREAMING = "an update of weights is in progress: reset_prefix_cache() ends it"
AGAIN = "start_weight_update() begins it again, finish_weight_update() gives it up"


@dataclass
class _Stream:
    """An update of weights in progress, whose tensors come one by one."""

    is_session: bool  # `start_weight_update` began it, and only `finish_weight_update` ends it
    lacked_before: str  # why no request could run before; empty if some could
    needs_all: bool  # of the model's weights; otherwise some are enough for a model that is whole


class _Load:
    """A call of `load_weights` that has not returned yet."""


class Maintenance:
    """Changes the memory of a running engine. The engine's owner calls the methods between its calls of
    `Engine.step`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asleep: frozenset[str] = frozenset()  # parts of the worker's memory
        self._are_dropped = False  # the weights are asleep at level 2
        self._paused_by: PauseMode | PauseWait | None = None  # the last call that paused the engine; None: it is not
        self._waits: weakref.WeakSet[PauseWait] = weakref.WeakSet()  # an interrupt may cut off their ends
        self._lacks_weights = ""  # why, if an update has failed half-way
        self._stream: _Stream | None = None  # an update whose tensors come one by one
        self._spoilt = ""  # why the update that `start_weight_update` began can no longer be completed
        self._loads: weakref.WeakSet[_Load] = weakref.WeakSet()  # an interrupt may cut off their ends
        self._refuses = False  # new requests, from the start of such an update until one is whole

    @property
    def has_session(self) -> bool:
        """Whether an update that `start_weight_update` began has not ended yet."""
        return bool(self._spoilt) or (self._stream is not None and self._stream.is_session)

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    def sleep(self, level: int = 1) -> SleepReport:
        """Free the device's memory of weights and cache. If this raises an error, the engine goes on as before."""
        if isinstance(level, bool) or level not in LEVELS:
            raise ValueError(f"level must be 1 (weights stay in the host's memory) or 2 (weights are dropped), got "
                             f"{shown(level)}")
        self._end_stream()
        before = self._asleep, self._are_dropped, self._stream, self._lacks_weights, self._refuses, self._spoilt
        self._engine.rest()
        # Before the command: if an interrupt cuts off the answer, the worker may be asleep, and waking does no harm.
        if self._stream is not None:
            self._spoilt = SLEPT
            self._break_stream(self._stream, WeightsIncomplete(f"{SLEPT}: requests wait for an update with all "
                                                               "weights"))
        self._asleep = frozenset(PARTS)
        self._pause()
        try:
            report = self._engine.command(Sleep(level))
        except WorkerDied:
            raise
        except Exception:
            self._asleep, self._are_dropped, self._stream, self._lacks_weights, self._refuses, self._spoilt = before
            self._pause()
            raise
        self._are_dropped |= level == 2
        self._pause()
        return report

    def wake_up(self, tags: Sequence[str] | None = None) -> WakeReport:
        """Bring freed memory back to the device. If this raises an error, the engine sleeps on."""
        if tags is not None and (isinstance(tags, str) or not set(tags) <= set(PARTS)):
            raise ValueError(f"tags must be a list of {' and '.join(map(repr, PARTS))}, got {shown(tags)}")
        wanted = PARTS if tags is None else tuple(part for part in PARTS if part in tags)
        if wanted != (WEIGHTS,):
            self._end_stream()
        if not self._asleep.intersection(wanted):
            return WakeReport()
        report = self._engine.command(WakeUp(wanted))
        if report.are_weights_whole:  # those that were dropped or incomplete have been read from their files
            self._let_requests_run()
        if report.were_weights_read and (self._engine.weights_version or self._engine.scheduler.cache.outlives_sleep):
            self._engine.take_new_weights()  # the files may have changed
        if WEIGHTS in wanted:
            self._are_dropped = False
        self._asleep -= set(wanted)
        self._pause()
        return report

    def update_weights(self, command: UpdateWeights) -> UpdateReport:
        """Replace weights. If the update is refused, nothing has changed. If it fails after that, requests wait until
        another update succeeds."""
        if self._stream is not None and self._stream.is_session:
            raise ValueError("an update of weights is in progress: give its weights to load_weights, and end it with "
                             "finish_weight_update()")
        if not self._lacks_weights:  # else the worker takes nothing but all weights
            self._check_unspoilt()
        self._check_loaded()
        with suppress(WeightsIncomplete):  # the weights of this update may be all
            self._end_stream()
        before = self._lacks_weights
        self._rest()
        self._lacks_weights = UPDATING
        self._pause()
        try:
            report = self._engine.command(replace(command, keeps_rows=self._keeps_rows))
        except WorkerDied:
            raise
        except Exception as error:
            self._lacks_weights = str(error) if isinstance(error, WeightsIncomplete) else before
            self._are_dropped |= isinstance(error, WeightsIncomplete) and WEIGHTS in self._asleep
            self._pause()
            raise
        self._take_new_weights()
        return report

    # Updates whose tensors come one by one

    def start_weight_update(self) -> None:
        """Begin an update that lasts until `finish_weight_update` and must have all weights by then."""
        if self._stream is not None and self._stream.is_session:
            raise ValueError("an update of weights is in progress: end it with finish_weight_update() first")
        self._end_stream()
        self._rest()
        self._spoilt = ""
        self._open_stream(is_session=True)

    def load_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]],
                     run: Callable[[Callable[[], None]], None]) -> None:
        """Replace weights, each as soon as it comes. `run` calls a function with the engine between two steps. Between
        two weights other callers may use the engine, but they cannot end the update."""
        load, session = _Load(), self._stream if self.has_session else None
        self._loads.add(load)
        try:
            for given in named_weights.weights_one_by_one(weights):
                run(partial(self.stream_weight, given, session))
        except BaseException:  # the rest of the call is missing
            if self._stream is not None:
                self._stream.needs_all = True
            raise
        finally:
            self._loads.discard(load)

    def stream_weight(self, given: NamedArray | NamedTensor, session: _Stream | None = None) -> None:
        """Replace one weight of an update. An update that `start_weight_update` began lasts until
        `finish_weight_update`. Without it, this call begins an update, which lasts until a method other than this one
        is called. If the update's first weight does not fit, nothing has changed. session: the update to which the
        weight belongs, if `start_weight_update` has begun it."""
        self._check_unspoilt()
        if session is not None and session is not self._stream:
            raise ValueError("the weight arrived after its update had ended: send it again in another update")
        if self._stream is None:
            self._rest()
            self._open_stream(is_session=False)
        stream = self._stream
        assert stream is not None
        try:
            self._engine.command(StreamWeight(given, self._keeps_rows))
        except WorkerDied:
            raise
        except Exception as error:
            self._break_stream(stream, error)
            if stream.is_session:
                self._spoilt = f"a weight of this update was refused ({error})"
            raise

    def finish_weight_update(self) -> UpdateReport:
        """End the update that `start_weight_update` began."""
        if self._spoilt:
            spoilt, self._spoilt = self._spoilt, ""
            raise ValueError(f"the update has ended without changing what is served: {spoilt}. Begin it again with "
                             "start_weight_update()")
        if self._stream is None or not self._stream.is_session:
            raise ValueError("no update of weights has begun: start_weight_update() begins one")
        self._check_loaded()
        return self._finish_stream(self._stream)

    def _open_stream(self, *, is_session: bool) -> None:
        self._stream = _Stream(is_session, self._lacks_weights, needs_all=is_session)
        self._lacks_weights = IN_SESSION if is_session else STREAMING
        self._refuses = True
        self._pause()

    def _finish_stream(self, stream: _Stream) -> UpdateReport:
        try:
            report = self._engine.command(FinishStream(stream.needs_all))
        except WorkerDied:
            raise
        except Exception as error:
            self._break_stream(stream, error)
            raise
        if report.num_tensors:
            self._stream = None
            self._take_new_weights()
        else:
            self._break_stream(stream, None)
        return report

    def _break_stream(self, stream: _Stream, error: Exception | None) -> None:
        """End an update that failed, or in which no weight came. If any weight was replaced, requests wait and new ones
        are refused."""
        self._stream = None
        self._lacks_weights = str(error) if isinstance(error, WeightsIncomplete) else stream.lacked_before
        self._are_dropped |= isinstance(error, WeightsIncomplete) and WEIGHTS in self._asleep
        self._refuses = bool(self._lacks_weights)
        self._pause()

    def _end_stream(self) -> None:
        """End an update that `start_weight_update` did not begin, because a different call follows. Raises
        WeightsIncomplete if weights are missing."""
        if self._stream is not None and not self._stream.is_session:
            self._check_loaded()
            self._finish_stream(self._stream)

    def _check_unspoilt(self) -> None:
        """Raise ValueError if the update that `start_weight_update` began has failed. The rest of its weights must not
        be served alone."""
        if self._spoilt:
            raise ValueError(f"{self._spoilt}: {AGAIN}")

    def _check_loaded(self) -> None:
        """Raise WeightsIncomplete while a call of `load_weights` has not returned, in another thread or around its
        iterator. An update that ended now would lack the call's other weights."""
        if self._stream is not None and self._loads:
            raise WeightsIncomplete(LOADING)

    def _admit_requests(self) -> None:
        """End an unfinished update before requests are added, or refuse the requests if weights are missing."""
        self._end_stream()
        if self._lacks_weights:
            raise WeightsIncomplete(self._lacks_weights)

    def _let_requests_run(self) -> None:
        """Note that the worker's weights are complete. While an update goes on, requests still wait for its end."""
        if self._stream is None:
            self._lacks_weights, self._refuses = "", False
        else:
            self._stream.lacked_before = ""

    def _take_new_weights(self) -> None:
        """Raise the version of the weights after a complete update."""
        self._lacks_weights, self._refuses, self._are_dropped, self._spoilt = "", False, False, ""
        self._asleep -= {WEIGHTS}
        self._engine.take_new_weights()
        self._pause()

    def weights_checksum(self) -> WeightsChecksum:
        """Compute the checksums of the weights, after the steps in flight."""
        self._end_stream()
        if self._stream is not None:
            raise ValueError(f"weights_checksum: {self._lacks_weights}")
        self._engine.settle()
        return self._engine.command(ChecksumWeights())

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget cached pages. Returns True if no page is left that a prefix hit could find."""
        self._end_stream()
        if reset_running_requests:
            self._engine.rest()
        return self._engine.forget_cached()

    def drop_cache_session(self, session: str | tuple[str, str]) -> bool:
        """Delete the pages of a session. Returns False if there is none of this name."""
        return drop_session(self._engine, session)

    @property
    def is_paused(self) -> bool:
        return self._paused_by is not None

    def new_wait(self, clears_cache: bool) -> PauseWait:
        """Make the object that represents a call which waits until all requests have ended. Any thread may call
        this."""
        return PauseWait(clears_cache)

    def begin_wait(self, wait: PauseWait) -> None:
        """Begin to wait until all requests have ended. Requests that arrive meanwhile are added after the pause."""
        if self._engine.pause.is_on:
            raise ValueError("pause_generation: mode='wait' waits for running requests, and none can run: "
                             f"{self._engine.pause.reason}")
        self._waits.add(wait)
        self._pause()

    def pause_if_done(self, wait: PauseWait) -> bool:
        """Pause the engine if all requests have ended. Returns whether it is paused. Raises ValueError if the requests
        will not run to their ends."""
        wait.check()
        if not wait.is_met and self._engine.num_requests:
            if self._engine.pause.is_on:
                raise ValueError(f"pause_generation: requests could not run to their ends: {self._engine.pause.reason}")
            return False
        if not wait.is_met:
            self._stop_steps(wait if len(self._waits) == 1 else PauseMode.WAIT, clears_cache=False)
        return True

    def withdraw(self, wait: PauseWait) -> None:
        """End a wait whose caller was cancelled or has failed. A pause that another caller asked for stays."""
        self._waits.discard(wait)
        if self._paused_by is wait:
            self._paused_by = None
        self._pause()

    def pause(self, mode: str, *, clears_cache: bool) -> None:
        """Run no further step until `resume`. clears_cache: forget the cached pages that no request holds."""
        self._stop_steps(PauseMode.from_names(mode, clears_cache), clears_cache)

    def resume(self) -> None:
        self._end_waits(RESUMED)
        self._paused_by = None
        self._pause()

    def _stop_steps(self, asked: PauseMode | PauseWait, clears_cache: bool) -> None:
        """Pause the engine. Calls that still wait until all requests have ended fail if any requests are left."""
        self._engine.settle()
        clears_cache |= self._end_waits(OVERTAKEN if self._engine.num_requests else "")
        self._paused_by = asked
        self._pause()
        if asked is PauseMode.ABORT:
            self._engine.abort_all()
        if clears_cache:
            self._engine.forget_cached()

    def _end_waits(self, failure: str) -> bool:
        """End all calls that wait until all requests have ended. They fail with the message `failure`, or succeed if it
        is empty. Returns whether a call that succeeds asks to clear the cache."""
        ended = list(self._waits)
        self._waits.clear()
        for wait in ended:
            wait.failure, wait.is_met = failure, not failure
        return any(wait.is_met and wait.clears_cache for wait in ended)

    def _rest(self) -> None:
        """Bring the engine to rest before weights change. Requests keep their rows only if `pause` was told to keep
        them."""
        if self._paused_by is PauseMode.IN_PLACE:
            self._engine.settle()
        else:
            self._engine.rest()

    @property
    def _keeps_rows(self) -> bool:
        return self._paused_by is PauseMode.IN_PLACE and self._engine.num_requests > 0

    def start_profile(self, prefix: str | None = None) -> None:
        self._engine.command(profiling.StartProfile(prefix))

    def stop_profile(self, folder: str) -> str:
        """Stop the profile and write it to a file. Returns the file's path."""
        return self._engine.command(profiling.StopProfile(folder))

    def _pause(self) -> None:
        asked = PAUSED if self.is_paused else ""
        sleep_level = (2 if self._are_dropped else 1) if self._asleep else 0
        self._engine.pause = Pause(self._lacks_weights or (ASLEEP if self._asleep else asked), sleep_level,
                                   self._admit_requests if self._refuses else None, self._waits)
