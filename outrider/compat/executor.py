"""The objects between an engine of vLLM and its model, through which trainers load weights. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from outrider.compat.missing_modules import WORKER

Weights = Mapping[str, Any] | Iterable[tuple[str, Any]]


class VllmPlace:
    """Stands for an object of vLLM. Only some of its attributes exist here."""

    def __init__(self, path: str, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self._path = path

    if not TYPE_CHECKING:  # a checker knows which attributes there are

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise AttributeError(f"{self._path}.{name} is not supported: {WORKER}")


def executor_around(load_weights: Callable[[Weights], None]) -> VllmPlace:
    """Make an executor whose `driver_worker.model_runner.model.load_weights` calls the given function."""
    worker = VllmPlace("driver_worker", model_runner=runner_around(load_weights))
    return VllmPlace("model_executor", driver_worker=worker)


def runner_around(load_weights: Callable[[Weights], None]) -> VllmPlace:
    """Make the part of a worker whose `model.load_weights` calls the given function."""
    return VllmPlace("model_runner", model=VllmPlace("model", load_weights=load_weights))
