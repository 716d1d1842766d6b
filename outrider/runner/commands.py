"""Commands to a worker beside batches: typed, answered, and carried out in order with steps. No torch here.

A command's method `carry_out` does its work in the worker, so a new command is one class, which may also be defined
outside the package. A command is plain data: a worker in another process gets it through a pipe.

Beside batches a worker takes *commands* (`runner/commands.py`): typed, picklable, each with a typed answer.
`Runner.command` returns a future of the answer. Commands and steps share one order: a command runs after all steps that
were submitted before it and before all that are submitted later, on the thread that runs the steps. A worker in its own
process gets commands through the same pipe as batches. If a command raises, or one process cannot unpickle an object of
the other, the exception is the command's answer, and steps go on. `Command.carry_out(worker)` does the work.

`engine/maintenance.py` builds `sleep`, `wake_up` and `update_weights` on commands. First `Engine.rest` waits for the
steps in flight, preempts all requests and empties the cache. The engine stays paused until its weights and cache are
back. In the worker `runner/residence.py` finds every tensor of the model, the drafters' modules and the pool
(`runner/storages.py`) and frees the memory behind these tensors; the tensor objects and their views stay. On a GPU the
memory may have other addresses when it comes back, so captured steps are dropped and captured again. On a CPU the
addresses stay the same, so pointers in native code stay valid. `runner/weight_update.py` checks all new weights before
it copies the first. If a copy fails, the weights are incomplete: requests wait for an update with all weights, or until
the weights have slept and were read from their files again. Only the worker has this information (`WakeReport`)."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from outrider.core.weights_checksum import WeightsChecksum as WeightsChecksum

WEIGHTS, KV_CACHE = "weights", "kv_cache"
PARTS = (WEIGHTS, KV_CACHE)  # parts of a worker's memory that sleep and wake by themselves
Answer = TypeVar("Answer")


class Command(ABC, Generic[Answer]):
    """Work that a worker does between two steps: steps submitted before it have run, later ones have not begun. If the
    command raises an exception, the exception is its answer, and steps go on."""

    @abstractmethod
    def carry_out(self, worker: Any) -> Answer:
        """Do the work in the worker, on the thread of its steps, and return the answer. `worker` is a
        `runner.worker.Worker`. The answer must be picklable, and importable without torch."""

    def combine(self, answers: Sequence[Answer]) -> Answer:
        """Combine the answers of all ranks, in rank order, into one answer. By default rank 0's answer is taken."""
        return answers[0]


class Errand(ABC):
    """Background work that a feature does in a worker, such as reading files or compiling. It begins as soon as the
    worker receives it, and neither steps nor commands wait for it. Like a command, it is plain data. If it fails, its
    future raises ValueError, and steps go on."""

    @abstractmethod
    def begin(self, worker: Any) -> Future[Any]:
        """Begin the work, and return a future that is done when the work is; the future's result is not used. Called in
        the worker, on the thread that reads its messages, so it must return quickly. `worker` is a
        `runner.worker.Worker`. `worker.feature` finds the feature's part in the worker, which does the work on a thread
        of its own."""


@dataclass(frozen=True)
class MakeFeature(Errand):
    """Make the worker's part of a feature when a request first asks for the feature. Steps that are submitted later
    include this part."""

    name: str

    def begin(self, worker: Any) -> Future[Any]:
        worker.feature(self.name)
        return done_errand()


def done_errand() -> Future[Any]:
    """Return a future that is already done, for an errand that finished at once."""
    done: Future[Any] = Future()
    done.set_result(None)
    return done


@dataclass(frozen=True)
class SleepReport:
    """The memory that a worker freed when it went to sleep, and the seconds that this took."""

    total_bytes: int = 0  # of the weights and the cache that were on the device
    freed_bytes: int = 0  # of these, what the device has back
    host_bytes: int = 0  # copies that were made in the host's memory
    seconds: float = 0.0


@dataclass(frozen=True)
class WakeReport:
    """The seconds that a worker took to wake up, and the state of its weights. Steps are captured again only when all
    parts of the memory are awake."""

    seconds: float = 0.0
    num_captured: int = 0
    capture_seconds: float = 0.0  # part of `seconds`
    are_weights_whole: bool = True  # False: they are dropped, or an update of them has failed half-way
    were_weights_read: bool = False  # from the model's files, because they had been dropped


@dataclass(frozen=True)
class UpdateReport:
    """The number of tensors that an update of weights replaced, and the seconds that it took."""

    num_tensors: int = 0
    seconds: float = 0.0
    num_captured: int = 0  # captured steps that were made anew
    capture_seconds: float = 0.0  # part of `seconds`


class WeightsIncomplete(RuntimeError):
    """Raised when an update failed after some weights had changed. No step may run until an update with all weights
    succeeds."""


@dataclass(frozen=True)
class CountPaddedSteps(Command[int]):
    """Count the steps whose batches were padded."""

    def carry_out(self, worker: Any) -> int:
        return int(worker.num_padded_steps)


@dataclass(frozen=True)
class Sleep(Command[SleepReport]):
    """Free the memory of weights and cache. No step may be submitted until all parts are awake again."""

    level: int  # 1: weights are kept in the host's memory; 2: they are dropped

    def carry_out(self, worker: Any) -> SleepReport:
        report: SleepReport = worker.residence.sleep(self.level)
        return report

    def combine(self, answers: Sequence[SleepReport]) -> SleepReport:
        return SleepReport(sum(own.total_bytes for own in answers), sum(own.freed_bytes for own in answers),
                           sum(own.host_bytes for own in answers), max(own.seconds for own in answers))


@dataclass(frozen=True)
class WakeUp(Command[WakeReport]):
    """Bring sleeping parts of the memory back to the device. Parts that are awake stay as they are."""

    parts: tuple[str, ...] = PARTS

    def carry_out(self, worker: Any) -> WakeReport:
        report: WakeReport = worker.residence.wake_up(self.parts)
        return report

    def combine(self, answers: Sequence[WakeReport]) -> WakeReport:
        return replace(max(answers, key=lambda own: own.seconds),
                       are_weights_whole=all(own.are_weights_whole for own in answers))


@dataclass(frozen=True)
class NamedArray:
    """A tensor of a checkpoint in the host's memory, as an array with its name and the name of its torch dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]  # its bytes


@dataclass(frozen=True)
class NamedTensor:
    """A torch tensor with its name in a checkpoint. A worker in the same process gets the tensor itself, on any device;
    a worker in another process gets a NamedArray."""

    name: str
    tensor: Any

    def as_array(self) -> NamedArray:
        """Copy the tensor to the host's memory as a NamedArray."""
        data = self.tensor.cpu().contiguous()
        return NamedArray(self.name, str(data.dtype).removeprefix("torch."), tuple(data.shape),
                          data.reshape(-1).view(sys.modules["torch"].uint8).numpy())

    def __reduce__(self) -> tuple[Any, ...]:
        array = self.as_array()
        return NamedArray, (array.name, array.dtype, array.shape, array.data)


@dataclass(frozen=True)
class UpdateWeights(Command[UpdateReport]):
    """Replace weights by the given tensors, which have the names of the model's checkpoint and come as arrays or in
    files. If one tensor does not fit, nothing is changed."""

    arrays: tuple[NamedArray, ...] = ()
    path: str | None = None  # a folder with safetensors files, one such file or a GGUF file; `arrays` are not read then
    keeps_rows: bool = False  # requests go on with their states, from drafts too that the old weights have accepted

    def carry_out(self, worker: Any) -> UpdateReport:
        report: UpdateReport = worker.residence.update_weights(self)
        return report

    def combine(self, answers: Sequence[UpdateReport]) -> UpdateReport:
        return max(answers, key=lambda own: own.seconds)


@dataclass(frozen=True)
class StreamWeight(Command[None]):
    """Replace one weight of an update whose tensors come one by one. The first such command begins the update."""

    given: Any  # a NamedArray; in the worker's own process a NamedTensor
    keeps_rows: bool = False  # see UpdateWeights

    def carry_out(self, worker: Any) -> None:
        worker.residence.stream_weight(self.given, keeps_rows=self.keeps_rows)


@dataclass(frozen=True)
class FinishStream(Command[UpdateReport]):
    """End an update whose tensors came one by one."""

    needs_all: bool  # whether all weights of the model must have come

    def carry_out(self, worker: Any) -> UpdateReport:
        report: UpdateReport = worker.residence.finish_stream(self.needs_all)
        return report

    def combine(self, answers: Sequence[UpdateReport]) -> UpdateReport:
        return max(answers, key=lambda own: own.seconds)


@dataclass(frozen=True)
class ChecksumWeights(Command["WeightsChecksum"]):
    """Compute the checksums of all weights, without changing the weights."""

    def carry_out(self, worker: Any) -> WeightsChecksum:
        report: WeightsChecksum = worker.residence.checksum()
        return report


@dataclass(frozen=True)
class PrepareIdle(Command["float | None"]):
    """Let an idle worker prepare for later steps: see `Runner.idle`. A worker with a single rank also does so by itself
    while no message comes."""

    quiet_seconds: float

    def carry_out(self, worker: Any) -> float | None:
        pause: float | None = worker.idle(self.quiet_seconds)
        return pause
