"""CaptureChooser: chooses which captured step serves a batch, and which step is captured when. It chooses once for each
batch, before the batch runs, from data on the host.

A choice is plain data that can be sent with its batch. `CudaRunner` carries it out and decides nothing more. Only the
chooser reads the clock. If a capture fails, the step still runs at the chosen size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from functools import partial
from typing import NamedTuple

from outrider.core import ScheduledBatch, Uncaptured
from outrider.runner.graphs.keys import GraphKey, GraphKeys, SamplerForm
from outrider.runner.graphs.losses import LONG, Losses
from outrider.runner.graphs.sizes import MOST_LATER
from outrider.runner.row_state import RowState

log = logging.getLogger("outrider")
QUIET, LONG_QUIET = 0.02, 0.5  # seconds without requests before a capture that is short, and before any other


class CaptureOrder(NamedTuple):
    """An order to capture the key's step, or only to load the step's kernels."""

    key: GraphKey
    only_loads: bool = False  # load its kernels and capture nothing yet
    pauses: bool = False  # it delays requests that could run without it, so no other such order follows for a while


class RunEagerly(NamedTuple):
    """Run the batch uncaptured at exactly its size, because no graph could serve it."""

    reason: Uncaptured


class Launch(NamedTuple):
    """Run the step of this key without its graph: the host launches every kernel."""

    key: GraphKey
    reason: Uncaptured


class Replay(NamedTuple):
    """Replay the key's graph. A rank that has no memory for the graph launches the same step."""

    key: GraphKey
    before: CaptureOrder | None = None  # carried out before the step, to capture the graph that it replays
    behind: CaptureOrder | None = None  # carried out when the step is queued, for the batch's own size


StepChoice = Replay | Launch | RunEagerly


class _Substitute(NamedTuple):
    """The way in which a step runs while its key has no graph."""

    choice: StepChoice
    loss: float  # seconds
    may_capture: bool  # the key gets a graph once that is due


class CaptureChooser:
    def __init__(self, keys: GraphKeys, captured: Collection[GraphKey], loaded: Collection[GraphKey]) -> None:
        """captured: keys that have graphs. loaded: keys whose kernels are compiled and loaded. Both grow as choices are
        carried out."""
        self.keys, self._captured, self._loaded = keys, captured, loaded
        self.losses = Losses()
        self._refused: set[GraphKey] = set()
        self._num_at_start = 0
        self._goes_ahead = True
        self._usual: list[GraphKey] = []  # captured while the engine is idle, before any batch needs them
        self._ways: dict[GraphKey, Replay | _Substitute] = {}  # how steps of a key run, until the next capture

    def choose(self, batch: ScheduledBatch, state: RowState) -> StepChoice:
        """Choose how the batch runs, from the host's data about rows alone. Called after the batch's admissions."""
        key = self.keys.key_for(batch, state)
        if isinstance(key, Uncaptured):
            return RunEagerly(key)
        if key.has_prompts and (own := self.losses.times.own_size(key, batch.num_tokens)) is not None:
            return Launch(own, Uncaptured.OWN_SIZE)
        return self.choose_for(key)

    def choose_for(self, key: GraphKey) -> StepChoice:
        """Choose how a batch of this key runs.

        A step whose key has no graph runs on the cheapest wider graph. If a capture of the key is due, the capture
        follows that step. A step with prompts is launched without a graph if that costs less time than padding. A
        decode step that no graph covers is captured now, because more steps of its size will follow. Nothing is
        captured if memory is short or MOST_LATER captures have been made."""
        way = self._ways.get(key)
        if way is None:
            way = self._ways[key] = self._find_way(key)
        if isinstance(way, Replay):
            return way
        choice, loss, may_capture = way
        self.losses.add(key, loss)
        if may_capture and self.losses.is_due(key):
            is_loaded = key in self._loaded
            if isinstance(choice, Replay):
                return choice._replace(behind=CaptureOrder(key, only_loads=not is_loaded, pauses=True))
            if is_loaded:  # else the step that is launched now loads what the capture needs
                return Replay(key, before=CaptureOrder(key, pauses=True))
        return choice

    def choose_idle(self, quiet_seconds: float) -> CaptureOrder | float | None:
        """Choose one capture to make now, if the engine has been idle long enough: QUIET seconds for a capture that is
        expected to be short, LONG_QUIET for any other. Otherwise return the seconds after which to ask again; None if
        there is nothing to capture before the next step.

        First comes the key whose steps have lost the most time, then the usual keys."""
        missed = self.losses.worst(self._refused)
        usual = [key for key in self._usual if key not in self._captured and key not in self._refused]
        if self._is_full or not self._goes_ahead or not (missed or usual):
            return None
        least = QUIET if self.losses.capture_seconds <= LONG else LONG_QUIET
        if quiet_seconds < least:
            return least - quiet_seconds
        if missed is None:
            self._num_at_start += 1  # memory was planned for it
        return CaptureOrder(missed or usual[-1])

    def stop_ahead(self) -> None:
        self._goes_ahead = False

    def learn(self, order: CaptureOrder, seconds: float | None) -> None:
        """Note how many seconds an order took. None means that it failed; its key is then never captured again."""
        if seconds is None:
            self._refused.add(order.key)
        elif order.only_loads:
            return
        else:
            self.losses.captured(order.key, seconds, pauses=order.pauses)
        self._ways.clear()

    def end_start(self) -> None:
        """Note that start-up is over: captures made from now on count as later ones."""
        self._num_at_start = len(self._captured)
        self._usual = list(self.keys.usual())
        num_full = sum(key.sampler is not SamplerForm.DRAW for key in self._captured)
        log.info("captured %d steps, %d of them with all sampling parameters, the last in %.1f ms; at most %d more "
                 "later, if needed", self._num_at_start, num_full, self.losses.capture_seconds * 1e3, MOST_LATER)

    @property
    def _is_full(self) -> bool:
        return len(self._captured) - self._num_at_start >= MOST_LATER

    def _find_way(self, key: GraphKey) -> Replay | _Substitute:
        if key in self._captured:
            return Replay(key)
        times = self.losses.times
        wider, launches = self.keys.wider(key, self._captured, partial(times.of_padding, key)), times.of_launches(key)
        padding = math.inf if wider is None else times.of_padding(key, wider)
        may_capture = key not in self._refused and not self._is_full
        if wider is not None and not (key.has_prompts and launches < padding):
            return _Substitute(Replay(wider), padding, may_capture)
        if may_capture and not key.has_prompts:
            return _Substitute(Replay(key, before=CaptureOrder(key)), launches, may_capture=False)
        reason = Uncaptured.TOO_MANY_CAPTURES if self._is_full else Uncaptured.NEW_SIZE
        return _Substitute(Launch(key, Uncaptured.NO_MEMORY if key in self._refused else reason), launches, may_capture)
