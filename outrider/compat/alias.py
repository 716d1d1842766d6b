"""`install_as_vllm`: from then on `import vllm` finds Outrider. No torch.

A finder before all others answers imports of `vllm` and of its modules with the modules of this package: the same
objects, under a second name. Nothing is patched, and a vLLM that is installed stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "vllm"


class AliasFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, AliasLoader()) if fullname.split(".")[0] == NAME else None


class AliasLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module("outrider" + spec.name.removeprefix(NAME))
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # the import has put the alias's there


def install_as_vllm() -> None:
    """Make `from vllm import LLM, SamplingParams` find Outrider in this process. To be called before the first import
    of vllm; a second call changes nothing."""
    if any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        return
    if NAME in sys.modules:
        raise RuntimeError("vllm is imported already: call outrider.compat.install_as_vllm() before the first import "
                           "of vllm, or change the imports to outrider")
    sys.meta_path.insert(0, AliasFinder())
