"""Lazy imports: each name that a package exports is imported from its module when it is first used.

    if TYPE_CHECKING:
        from outrider.layers.moe import MoE
    else:
        __getattr__ = lazy_exports(__name__)

The imports under `TYPE_CHECKING` are the package's table of names; a type checker reads them as they are. A module that
needs a part at once writes `from outrider.layers import MoE`. One that needs it only for some models, devices or
settings writes `from outrider import layers` and `layers.MoE` where it is used, so the part is imported there.

A single module that is seldom needed is named in the same way. Classes of it are used as `residence.Residence`:

    if TYPE_CHECKING:
        from outrider.runner import residence
    else:
        residence = LateModule("outrider.runner.residence")
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(package: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package, which imports an exported name when it is first used."""

    def export(name: str) -> Any:
        home = exported_names(package).get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = home
        found = getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, found)  # the next use finds it without this function
        return found

    return export


@cache
def exported_names(package: str) -> Mapping[str, tuple[str, str]]:
    """Read which names a package exports from its imports under `TYPE_CHECKING`: name -> (module, attribute)."""
    source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    return {alias.asname or alias.name: (str(node.module), alias.name)
            for block in ast.parse(source).body
            if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
            for node in block.body if isinstance(node, ast.ImportFrom)
            for alias in node.names}


class LateModule:
    """A module that is imported when one of its names is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by tools that look at objects, which need not import anything
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def import_attribute(place: str) -> Any:
    """Return the attribute at "module:attribute", the form in which registries name their entries."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
