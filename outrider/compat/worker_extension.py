"""The worker whose methods `collective_rpc` calls: an object of a trainer's own class (`worker_extension_cls`).

The object has the attributes of vLLM's workers through which weights are loaded, and lives in the caller's process. No
torch before the first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from outrider.compat.executor import VllmPlace, Weights, runner_around
from outrider.config import EngineConfig
from outrider.core.fields import shown
from outrider.engine.load import find_model

NO_CLASS = "collective_rpc calls methods of a class of your own: start the engine with worker_extension_cls"


def extension_class(place: str) -> type:
    """Return the class that is named as "package.module.Class". Raises ValueError if there is none."""
    module, _, name = place.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"worker_extension_cls: {shown(place)} cannot be imported ({error}): give package.module.Class"
                         ) from None
    if not isinstance(found, type):
        raise ValueError(f"worker_extension_cls must be a class, got {shown(place)}")
    return found


class ExtendedWorker:
    """Calls an object of the trainer's class. There is one for all ranks."""

    def __init__(self, config: EngineConfig | None, load_weights: Callable[[Weights], None]) -> None:
        self._config, self._load_weights = config, load_weights
        self._worker: Any = None  # made by the first call

    def call(self, method: str | Callable[..., Any], args: Sequence[Any],
             kwargs: Mapping[str, Any] | None) -> list[Any]:
        """Call a method, or a function with the worker as its first argument. Returns the results of all workers, of
        which there is one."""
        if self._worker is None:
            self._worker = self._make()
        if not isinstance(method, str):
            return [method(self._worker, *args, **kwargs or {})]
        called = getattr(self._worker, method, None)
        if not callable(called) or method.startswith("_"):
            owner = type(self._worker).__bases__[0].__name__
            raise ValueError(f"{owner} has no public method {shown(method)}: define it in that class")
        return [called(*args, **kwargs or {})]

    def _make(self) -> Any:
        if self._config is None or self._config.worker_extension_cls is None:
            raise ValueError(NO_CLASS)
        torch = import_module("torch")
        _join_alone(torch.distributed)
        own = extension_class(self._config.worker_extension_cls)
        worker = type("Worker", (own,), {})()
        on_gpu = self._config.device != "cpu" and torch.cuda.is_available()
        vars(worker).update(
            rank=0, local_rank=0, device=torch.device("cuda", 0) if on_gpu else torch.device("cpu"),
            model_runner=runner_around(self._load_weights),
            model_config=VllmPlace("model_config", dtype=getattr(torch, _dtype_of(self._config))))
        return worker


def _join_alone(distributed: Any) -> None:
    """Make a process group of this process alone, unless the trainer has made one, because extensions read their rank
    from it."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def _dtype_of(config: EngineConfig) -> str:
    if config.dtype != "auto":
        return config.dtype
    values = find_model(config).config
    return str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch.")
