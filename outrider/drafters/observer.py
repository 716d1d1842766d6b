"""DraftObserver: follows the tokens and hidden states of all steps, for example to train a drafter."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from outrider.core import Limits, StepPart
from outrider.core.feature_parts import ResultPart
from outrider.drafters.base import Step


class DraftObserver(StepPart):
    """The base class of observers. Methods do nothing by default. A method must not raise an error, because the step
    goes on in any case."""

    def bind(self, limits: Limits) -> None:
        """Prepare for the first step. Called once, when no row holds a request."""

    def record(self, step: Step) -> None:
        """Called after a step has computed and accepted its tokens, before drafters run. The call is captured with the
        step, so it must not read device data on the host."""

    def end_step(self) -> ResultPart | None:
        """Called when a step's result is read. Returns the observer's reports, which are sent with the result."""
        return None

    def resting(self) -> AbstractContextManager[None]:
        """A context in which the observer does not use the device. The engine captures CUDA graphs in it: a capture
        frees the scratch memory of library products, which another thread must not use meanwhile."""
        return nullcontext()
