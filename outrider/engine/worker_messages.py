"""Messages between a parent and its worker processes. They are pickled and go through a pipe. No torch."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from outrider.core.drafter_faults import words_of

TORCH_FREE = ("builtins", "outrider.core", "outrider.runner.interface", "outrider.runner.commands",
              "outrider.models.sources", "outrider.models.config_reader")


@dataclass(frozen=True)
class OfCommand:
    """A message that announces a command or its answer, which follows as a separate message. So if one side cannot
    unpickle a command of an unknown class, only that command fails."""

    number: int


@dataclass(frozen=True)
class OfErrand:
    """A message that announces an errand (work beside the steps), which follows as a separate message, like a
    command."""

    number: int


@dataclass(frozen=True)
class ErrandDone:
    """A child's answer: the errand with this number is done, or has failed with this error."""

    number: int
    error: str | None


@dataclass(frozen=True)
class Failure:
    """The data of an exception, for sending it through the pipe. Unpickling the exception itself would call its
    constructor with other arguments."""

    kind: type[BaseException]
    message: str
    trace: str

    @classmethod
    def from_error(cls, error: BaseException) -> Failure:
        trace = "".join(traceback.format_exception(error))
        if not isinstance(error, Exception):  # sys.exit() in a command is not the parent's exit
            return cls(RuntimeError, words_of(error), trace)
        # The nearest type that the parent can import without torch.
        kind = next(t for t in type(error).__mro__ if t.__module__.startswith(TORCH_FREE))
        try:
            return cls(kind, str(error), trace)
        except Exception:  # an exception whose message cannot be made
            return cls(kind, words_of(error), trace)

    def to_error(self) -> BaseException:
        error = self.kind.__new__(self.kind, self.message)
        error.args = (self.message,)
        error.add_note(f"In the worker process:\n{self.trace}")
        return error
