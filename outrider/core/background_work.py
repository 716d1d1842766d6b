"""BackgroundWork: what a feature does beside the steps of a worker, with the weights of its model. No torch."""

from __future__ import annotations

from collections.abc import Sequence


class BackgroundWork:
    """Methods do nothing unless a feature defines them. The worker calls them, in order with its steps."""

    def start(self) -> None:
        """The worker is ready to serve."""

    def pause(self) -> None:
        """Wait for the current piece of work, and begin no more work. After this call weights may be freed or
        changed."""

    def resume(self) -> None:
        """Go on after a pause."""

    def forget_model(self) -> None:
        """Drop results that were made with the model's old weights, because the weights have changed. Called in a
        pause."""

    def close(self) -> None:
        """End the work and wait for its end. Called when the worker is closed."""


class AllBackgroundWork(BackgroundWork):
    """The work of several features, as one."""

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
