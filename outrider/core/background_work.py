"""BackgroundWork: base class for a feature's work in a worker beside the steps, such as training with the model's
weights. No torch."""

from __future__ import annotations

from collections.abc import Sequence


class BackgroundWork:
    """Base class of a feature's background work. A feature overrides the methods that it needs; by default a method
    does nothing. The worker calls the methods in order with its steps."""

    def start(self) -> None:
        """Called when the worker is ready to serve."""

    def pause(self) -> None:
        """Wait for the current piece of work, and begin no other. After this call weights may be freed or changed."""

    def resume(self) -> None:
        """Go on after a pause."""

    def forget_model(self) -> None:
        """Drop results that were made with the model's old weights, because the weights have changed. Called in a
        pause."""

    def close(self) -> None:
        """End the work and wait for its end. Called when the worker is closed."""


class AllBackgroundWork(BackgroundWork):
    """The background work of several features. Each method calls the method of every feature."""

    def __init__(self, each: Sequence[BackgroundWork] = ()) -> None:
        self._each = each

    def start(self) -> None:
        for work in self._each:
            work.start()

    def pause(self) -> None:
        for work in self._each:
            work.pause()

    def resume(self) -> None:
        for work in self._each:
            work.resume()

    def forget_model(self) -> None:
        for work in self._each:
            work.forget_model()

    def close(self) -> None:
        for work in self._each:
            work.close()


NO_WORK = BackgroundWork()
