"""Starts the processes of an engine. Each of them first imports the script of the caller. No torch.

A process imports the script because settings may contain classes from it, and because it may register families or
formats. `multiprocessing` imports it too, but it takes standard input for a file, does not know the name `vllm`
(`outrider.compat`), and shows one error for each process if the script makes an engine while it is imported.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import spawn
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from outrider.engine.script_import import ScriptImport

ALIAS = "outrider.compat.alias"  # by name: the package lies above this one
_hiding = threading.Lock()


@dataclass(frozen=True)
class CallersScript:
    """The caller's module `__main__`. Unpickling this object imports the module."""

    place: tuple[tuple[str, str], ...]  # as multiprocessing describes it; empty where there is no file to import
    is_vllm_aliased: bool

    @classmethod
    def of_this_process(cls) -> CallersScript:
        found = spawn.get_preparation_data("")
        place = {key: found[key] for key in ("init_main_from_name", "init_main_from_path") if key in found}
        path = place.get("init_main_from_path")
        if path is not None and not Path(path).is_file():  # <stdin>, or a cell of a notebook
            place = {}
        alias = sys.modules.get(ALIAS)
        return cls(tuple(place.items()), alias is not None and alias.is_installed())

    def check(self, *sent: object) -> None:
        """Raise ValueError if another process could not unpickle the objects, because a class was not defined in a
        file."""
        if not self.place and (name := _name_in_main(sent)) is not None:
            raise ValueError(f"{name} was defined in a shell, a notebook or on standard input, where the processes of "
                             "the engine cannot find it: write it into a file, and import it from there")

    def __reduce__(self) -> tuple[Callable[..., CallersScript], tuple[Any, ...]]:
        return _import_script, (self.place, self.is_vllm_aliased)


def spawn_process(target: Callable[..., None], args: tuple[Any, ...], *, name: str,
                  daemon: bool = False) -> SpawnProcess:
    """Start a process that imports the caller's script and then calls `target(*args)`."""
    script = CallersScript.of_this_process()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(script, target, *args), name=name,
                                                           daemon=daemon)
    with _without_script():
        process.start()
    return process


def check_sent(*sent: object) -> None:
    """Raise ValueError for settings that a spawned process could not unpickle."""
    CallersScript.of_this_process().check(*sent)


def _run(script: CallersScript, target: Callable[..., None], *args: Any) -> None:
    target(*args)


def _import_script(place: tuple[tuple[str, str], ...], is_vllm_aliased: bool) -> CallersScript:
    if is_vllm_aliased:
        import_module(ALIAS).install_as_vllm()
    ScriptImport.is_running = True
    spawn.prepare(dict(place))
    ScriptImport.is_running = False
    return CallersScript(place, is_vllm_aliased)


@contextmanager
def _without_script() -> Generator[None, None, None]:
    """A context in which multiprocessing finds no script for a new process to import."""
    main = sys.modules["__main__"]
    with _hiding:
        spec, file = main.__spec__, main.__dict__.pop("__file__", None)
        main.__spec__ = None
        try:
            yield
        finally:
            main.__spec__ = spec
            if file is not None:
                main.__file__ = file


class _MainNames(pickle.Unpickler):
    """Unpickles data to find out whether it refers to a name of `__main__`. Notes the first such name."""

    name: str | None = None

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__" and self.name is None:
            self.name = name
        return super().find_class(module, name)


def _name_in_main(sent: object) -> str | None:
    reader = _MainNames(io.BytesIO(ForkingPickler.dumps(sent)))
    reader.load()
    return reader.name
