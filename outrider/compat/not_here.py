"""The import error for modules that vLLM has and Outrider does not. No torch.

The import finder comes after all others, so it is asked only for modules that do not exist. If a plain module of
Outrider has the name of a vLLM package, it gets an empty `__path__`; otherwise Python would ask no finder for modules
inside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "outrider"


class MissingModuleFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package != PACKAGE:
            return None
        refuse_module(fullname, module)
        return None


def refuse_module(fullname: str, module: str) -> None:
    """Raise ModuleNotFoundError with what to use instead if vLLM has the module and Outrider does not."""
    instead = import_module("outrider.compat.missing_modules").instead_of(module)
    if instead is not None:
        # Without a `name`: `from outrider import platforms` would drop the error of a module that it has asked for.
        raise ModuleNotFoundError(f"{fullname} is not supported: {instead}")


def explain_missing_modules() -> None:
    """Make failing imports of vLLM's modules say what to use instead."""
    sys.meta_path.append(MissingModuleFinder())
