"""DrafterLearner: a head that learns from the traffic while it serves. It cannot change the text: with any weights of
the head, a draft is accepted only if the target's sampler picks the same token.

Steps record the texts that they serve (`traffic.py`). A thread trains a copy of the head on them, and compares copy and
serving head on texts that neither was trained on. If the copy is better, the thread of steps copies its weights over
the serving weights, before it runs its next step. While requests run, the trainer works for a small share of the time;
it may use all of it while the engine is idle. A low thread priority of the operating system would not do: a thread that
the system holds back may hold Python's lock.

Whatever the trainer raises is counted and logged, and the copy begins again from the serving head. After some failures
the trainer ends; drafting goes on with the head as it is."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from outrider.core import Admission, Limits, ScheduledBatch
from outrider.core.background_work import BackgroundWork
from outrider.core.drafter_faults import words_of
from outrider.drafters.base import Step
from outrider.drafters.observer import DraftObserver
from outrider.features.learning.candidate import Candidate
from outrider.features.learning.report import AdaptationReport
from outrider.features.learning.served_head import ServedHead
from outrider.features.learning.traffic import ClosedText, ServedText, TrafficRing

log = logging.getLogger("outrider")

SEGMENT_TOKENS = 256  # last tokens of a text that are kept
STEP_TEXTS = 8  # texts of one optimizer step
MICRO_TOKENS = 256  # tokens of a micro-batch: what the trainer computes without a rest
ROUND_STEPS = 10  # optimizer steps between two measurements
MOST_EPOCHS = 8  # times that a token of the traffic is trained on, on average
LEAST_TEXTS = 8  # to train on, before the trainer begins
LEAST_HELD_OUT = 4
MOST_HELD_OUT = 32  # the newest held-out texts are measured with
LEAST_GAIN = 0.02  # of the mean run on held-out texts, for a swap
MOST_FAILURES = 5
IDLE_SECONDS = 0.25  # without a step: the engine is idle
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class LearningSettings:
    share: float  # of the time that the trainer may work while requests run
    rate: float  # learning rate

    @classmethod
    def for_head(cls, hidden_size: int, share: float) -> LearningSettings:
        return cls(share, 1e-3 * min(1.0, 512 / hidden_size))


def count_served_tokens(served: ServedHead, memory_bytes: int, max_len: int) -> tuple[int, int]:
    """Return how many tokens of served texts fit into `memory_bytes`, and how many of them a segment has. Raises
    ValueError if that is too little for the trainer to begin with."""
    head = served.head
    token_bytes = len(head.aux_layers) * head.target.hidden_size * head.target.dtype.itemsize + 16
    length = min(SEGMENT_TOKENS, max_len)
    num_segments = memory_bytes // (token_bytes * length)
    least = 2 * LEAST_TEXTS
    if num_segments < least:
        raise ValueError(f"adapt_memory_bytes={memory_bytes} holds {num_segments} texts of {length} tokens, and the "
                         f"trainer needs {least}: give it at least {least * token_bytes * length}")
    return num_segments * length, length


class TrainerStopped(Exception):
    """Raised if the engine closes while the trainer works."""


class TextsForgotten(Exception):
    """Raised if the target's weights have changed since the training round began: the recorded texts then come from
    other weights."""


class DrafterLearner(DraftObserver, BackgroundWork):
    """Records served texts, trains a copy of the draft head on them, and serves with the copy's weights once they are
    better. The thread of steps calls all methods, except those that begin with an underscore and run in the trainer's
    thread."""

    def __init__(self, served: ServedHead, limits: Limits, settings: LearningSettings, num_tokens: int,
                 segment_tokens: int) -> None:
        """num_tokens: how many tokens of served texts are kept. segment_tokens: the most tokens that are kept of one
        text."""
        head = served.head
        self.served, self._settings = served, settings
        self.ring = TrafficRing(limits, num_tokens, len(head.aux_layers), head.target.hidden_size,
                                segment_tokens=segment_tokens, dtype=head.target.dtype, device=served.device)
        self._candidate = Candidate(served, settings.rate)
        self._stream = torch.cuda.Stream(served.device) if served.device.type == "cuda" else None
        self._random = random.Random(0)
        self._working = threading.Lock()  # held by the trainer while it works, and by others to keep it from working
        self._is_paused = False
        self._offer = threading.Event()  # better weights wait for the next step
        self._taken_at: torch.cuda.Event | None = None  # when the last swap's copies are done
        self._stop = threading.Event()
        self._num_in_flight = 0  # steps that have begun and whose results are not read
        self._last_step = 0.0  # when a step last began or ended
        self._num_trained_tokens = 0
        self._num_failures = 0  # since the last round that went well
        self._has_forgotten = False  # the texts of this round
        self._must_restart = False  # a round has failed, and its copy is not to be trusted
        self._report = AdaptationReport()
        self._told: AdaptationReport | None = None
        self._is_recording = True
        self._thread: threading.Thread | None = None

    # On the thread of steps

    def start(self) -> None:
        num_threads = torch.get_num_threads()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="outrider-trainer", daemon=True)
        self._thread.start()
        ready.wait()
        torch.set_num_threads(num_threads)  # the trainer has set its own number, which later threads would take over

    def measure_memory(self) -> int:
        """Measure the device memory that training a micro-batch and an optimizer's step need, in addition to what the
        trainer already holds. 0 on a CPU. Called before `start`."""
        device, head = self.served.device, self.served.head
        if device.type != "cuda":
            return 0
        length, token = self.ring.segment_tokens, 0 if head.target_ids is None else int(head.target_ids[0])
        text = ServedText(torch.full((length,), token, device=device),
                          torch.zeros(length, len(head.aux_layers), head.target.hidden_size, dtype=head.target.dtype,
                                      device=device), 1)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        with self._on_stream():
            self._candidate.add_gradients([text] * max(1, MICRO_TOKENS // length), 1.0)
            self._candidate.restart()
            self._candidate.apply()  # of no gradients, which changes nothing
            self._candidate.restart()
            torch.cuda.current_stream(device).synchronize()
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()  # it is counted once, as what the trainer will take
        return peak - before

    def bind(self, limits: Limits) -> None:
        self.ring.bind(limits)

    def begin(self, batch: ScheduledBatch) -> None:
        """Called before each step: close the recordings of requests that have left their rows, and take better weights
        if the trainer offers some."""
        self._last_step = time.monotonic()
        self._num_in_flight += 1
        self._try_recording(lambda: self.ring.end(batch.drafting.ends))
        if self._offer.is_set():
            self._swap()

    def admit(self, admissions: Sequence[Admission]) -> None:
        self._try_recording(lambda: self.ring.admit(admissions))

    def record(self, step: Step) -> None:
        self._try_recording(lambda: self.ring.record(step))

    def reset(self) -> None:
        self._num_in_flight = 0
        self._try_recording(self.ring.reset)

    def end_step(self) -> AdaptationReport | None:
        """Return the report, if it has changed since the last step."""
        self._last_step = time.monotonic()
        self._num_in_flight = max(0, self._num_in_flight - 1)
        report = self.report
        if report == self._told:
            return None
        self._told = report
        return report

    @property
    def report(self) -> AdaptationReport:
        return replace(self._report, num_texts=self.ring.num_texts)

    def pause(self) -> None:
        if not self._is_paused:
            self._working.acquire()
            self._is_paused = True

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._working.release()

    @contextmanager
    def resting(self) -> Iterator[None]:
        was_paused = self._is_paused
        self.pause()
        try:
            yield
        finally:
            if not was_paused:
                self.resume()

    def forget_model(self) -> None:
        assert self._is_paused
        self._offer.clear()
        self._has_forgotten = True
        self.ring.clear()
        self._num_trained_tokens = MOST_EPOCHS * self.ring.num_tokens  # the forgotten texts are trained on no more
        try:
            self._candidate.restart()
        except Exception as error:  # the new weights serve in any case; the trainer's next round tries again
            self._must_restart = True
            self._fail(error)

    def close(self) -> None:
        self._stop.set()
        self.resume()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _try_recording(self, work: Callable[[], None]) -> None:
        """Run work that records a step. If it fails, recording and training end, and the step goes on."""
        if not self._is_recording:
            return
        try:
            work()
        except torch.OutOfMemoryError:
            raise  # the device's lack, which the runner answers
        except Exception as error:
            self._is_recording = False
            self._stop.set()
            self._fail(error)

    def _swap(self) -> None:
        """Serve with the candidate's weights. The trainer waits until this is done."""
        try:
            self.served.take(self._candidate.weights)
            if self._stream is not None:
                self._taken_at = torch.cuda.Event()
                self._taken_at.record()
            self._report = replace(self._report, num_swaps=self._report.num_swaps + 1)
        except Exception as error:  # some weights may be new and some old: drafts are worse, and the text is the same
            self._fail(error)
        finally:
            self._offer.clear()

    # On the trainer's thread

    def _run(self, ready: threading.Event) -> None:
        try:
            torch.set_num_threads(1)  # of this thread
        finally:
            ready.set()
        with self._on_stream():
            if self._stream is not None:  # which made the weights
                self._stream.wait_stream(torch.cuda.default_stream(self.served.device))
            try:
                while self._num_failures < MOST_FAILURES:
                    self._try_round()
                    self._wait(POLL_SECONDS)
                log.error("the trainer of the drafter has ended after %d failures in a row", self._num_failures)
            except TrainerStopped:
                return

    def _try_round(self) -> None:
        try:
            if self._train_round():
                self._num_failures = 0
        except TrainerStopped:
            raise
        except TextsForgotten:
            return
        except Exception as error:  # a trainer that fails must not end serving
            self._num_failures += 1
            self._fail(error)
            self._must_restart = True
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()

    def _train_round(self) -> bool:
        """Train for some steps, measure, and offer the weights if they are better. Returns False while there are too
        few texts to learn from."""
        ring, self._has_forgotten = self.ring, False
        if self._must_restart:
            with self._at_work():
                self._candidate.restart()
            self._must_restart = False
        may_train = self._num_trained_tokens < MOST_EPOCHS * ring.num_tokens
        if len(ring.closed(is_held_out=True)) < LEAST_HELD_OUT or not may_train:
            return False
        for _ in range(ROUND_STEPS):
            training = ring.closed(is_held_out=False)  # anew for every step: the traffic goes on
            if len(training) < LEAST_TEXTS:
                return False
            self._train_step(self._random.sample(training, min(STEP_TEXTS, len(training))))
        serving, candidate = self._measure(ring.closed(is_held_out=True)[-MOST_HELD_OUT:])
        self._report = replace(self._report, serving_run=serving, candidate_run=candidate)
        if candidate >= serving + LEAST_GAIN:
            log.info("adapting the drafter: after %d steps the trained copy yields %.3f tokens a step on held-out "
                     "texts, the serving drafter %.3f: the copy is served from now on", self._report.num_steps,
                     candidate, serving)
            self._offer_weights()
        return True

    def _train_step(self, chosen: Sequence[ClosedText]) -> None:
        with self._at_work():
            texts = self.ring.read(chosen)
        if not texts:  # others have taken their places
            return
        for group in micro_batches(texts):
            with self._at_work():
                self._candidate.add_gradients(group, len(group) / len(texts))
        with self._at_work():
            self._candidate.apply()
        self._num_trained_tokens += sum(len(text.tokens) for text in texts)
        self._report = replace(self._report, num_steps=self._report.num_steps + 1)

    def _measure(self, chosen: Sequence[ClosedText]) -> tuple[float, float]:
        """Measure the mean number of tokens per step that the serving head and the candidate reach on the same
        texts."""
        with self._at_work():
            texts = self.ring.read(chosen)
        num_places, accepted = 0, [0, 0]
        for group in micro_batches(texts):
            for index in range(2):
                with self._at_work():
                    places, num_accepted = self._candidate.measure(group, is_serving=index == 0)
                accepted[index] += num_accepted
            num_places += places
        return 1 + accepted[0] / max(1, num_places), 1 + accepted[1] / max(1, num_places)

    def _offer_weights(self) -> None:
        """Let the thread of steps copy the candidate's weights, and wait until it has, because it reads them in
        place."""
        self._offer.set()
        while self._offer.is_set():
            self._wait(POLL_SECONDS)
        if self._taken_at is not None:
            self._taken_at.wait()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """A context in which the trainer may use the device. It is entered when the trainer is not paused. After it the
        trainer rests, so that training takes a bounded share of the time while requests run."""
        while not self._working.acquire(timeout=POLL_SECONDS):
            self._wait(0)
        try:
            if self._has_forgotten:
                raise TextsForgotten
            began = time.monotonic()
            yield
            if self._stream is not None:
                self._stream.synchronize()
            seconds = time.monotonic() - began
            self._report = replace(self._report, work_seconds=self._report.work_seconds + seconds)
        finally:
            self._working.release()
        self._rest(seconds * (1 / self._settings.share - 1))

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self._wait(0)
        while (now := time.monotonic()) < until and self._is_serving(now):
            self._wait(min(POLL_SECONDS, until - now))

    def _is_serving(self, now: float) -> bool:
        return self._num_in_flight > 0 or now - self._last_step < IDLE_SECONDS

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise TrainerStopped

    def _fail(self, error: Exception) -> None:
        log.warning("adapting the drafter failed; serving goes on without: %s", words_of(error), exc_info=error)
        self._report = replace(self._report, num_errors=self._report.num_errors + 1, error=words_of(error))

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def micro_batches(texts: Sequence[ServedText]) -> Iterator[list[ServedText]]:
    """Group the texts into micro-batches of at most MICRO_TOKENS tokens each, padding included."""
    group: list[ServedText] = []
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        if group and (len(group) + 1) * len(text.tokens) > MICRO_TOKENS:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
