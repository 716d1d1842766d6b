"""`install_as_vllm` makes `import vllm` find Outrider. No torch.

An import finder before all others answers imports of vLLM's modules with the modules of this package: the same objects
under a second name. `vllm` itself is a separate module with the names of `outrider` and the version of vLLM that they
follow, because scripts check the version before they use a name. Nothing is patched, and an installed vLLM is not
changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from outrider.compat.not_here import refuse_module

NAME = "vllm"
OWN = "outrider"
# Packages that have the same name here and there, and other modules.
OTHER_PACKAGES = ("kernels", "models", "ray")
# Scripts choose by it which names they use. Trainers warn of versions that they do not know: TRL 1.16 knows none after
# this one. Names and settings of later versions, up to 0.33, are here or are refused by name.
VLLM_VERSION = "0.31.0"


class AliasPackage(ModuleType):
    """The module `vllm`."""

    def __init__(self, own: ModuleType) -> None:
        super().__init__(NAME, own.__doc__)
        self._own = own
        self.__file__, self.__path__, self.__all__ = own.__file__, list(own.__path__), own.__all__
        self.__version__ = VLLM_VERSION
        self.__version_tuple__ = tuple(int(part) for part in VLLM_VERSION.split("."))

    def __getattr__(self, name: str) -> object:
        return getattr(self._own, name)


class AliasFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == NAME:
            return ModuleSpec(NAME, PackageLoader(), is_package=True)
        return ModuleSpec(fullname, AliasLoader()) if fullname.split(".")[0] == NAME else None


class PackageLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AliasPackage(import_module(OWN))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the module's code has run already."""


class AliasLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = spec.name.removeprefix(NAME + ".")
        if name in OTHER_PACKAGES:
            refuse_module(spec.name, name)
        module = import_module(f"{OWN}.{name}")
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # the import has put the alias's there


def is_installed() -> bool:
    return any(isinstance(finder, AliasFinder) for finder in sys.meta_path)


def install_as_vllm() -> None:
    """Make `from vllm import LLM, SamplingParams` find Outrider in this process. Call it before the first import of
    vllm; a second call changes nothing."""
    if is_installed():
        return
    if NAME in sys.modules:
        raise RuntimeError("vllm is imported already: call outrider.compat.install_as_vllm() before the first import "
                           "of vllm, or change the imports to outrider")
    sys.meta_path.insert(0, AliasFinder())
