"""Commands to a worker beside batches: typed, answered, and carried out in order with steps. No torch here.

A command says in `carry_out` what the worker does with it, so that a further one is a class in a file of its own, which
may also lie outside the package. It is plain data: a worker in another process gets it through a pipe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


class Command(ABC, Generic[Answer]):
    """Something that a worker does between two steps: steps submitted before it have run, later ones have not begun. If
    it raises, the exception is the command's answer, and steps go on."""

    @abstractmethod
    def carry_out(self, worker: Any) -> Answer:
        """Called in the worker, on the thread of its steps. `worker`: a `runner.worker.Worker`. The answer must be
        picklable, and importable without torch."""
