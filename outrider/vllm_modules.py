"""Modules of vLLM that are not here under their names: an import finds the same names, or is told what to use instead.

A finder behind all others, so that it is asked only for modules that do not exist. No torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from outrider.core.vllm_settings import NO_ADAPTERS, NO_IMAGES, ONE_DEVICE

PACKAGE = "outrider."
# Modules with names of this package, by their place in vLLM, and the packages that hold such modules.
OFFERED: dict[str, tuple[str, ...]] = {
    "engine.arg_utils": ("AsyncEngineArgs", "EngineArgs"),
    "engine.async_llm_engine": ("AsyncLLMEngine",),
    "entrypoints": (),
    "entrypoints.llm": ("LLM",),
    "pooling_params": ("PoolingParams",),
    "v1": (),
    "v1.engine": (),
    "v1.engine.async_llm": ("AsyncLLM",),
}
REFUSED = {
    "assets": NO_IMAGES,
    "distributed": ONE_DEVICE,
    "engine.llm_engine": "use LLM, or AsyncLLM where requests come at any time",
    "entrypoints.openai": "run `outrider serve`",
    "envs": "settings are arguments of LLM and flags of the commands",
    "logger": "use logging.getLogger('outrider')",
    "lora": NO_ADAPTERS,
    "model_executor": "docs/extending.md says how to add a model",
    "multimodal": NO_IMAGES,
    "platforms": "choose a device with device=",
    "plugins": "docs/extending.md says how to add parts",
    "transformers_utils": "LLM.get_tokenizer gives the tokenizer",
    "utils": "it has vLLM's own helpers; a request id is any text, such as uuid.uuid4().hex",
}


class _Names(Loader):
    """Makes a module whose names are those of the package."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = OFFERED[module.__name__.removeprefix(PACKAGE)]

        def get(name: str) -> object:
            if name in names:
                return getattr(import_module("outrider"), name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__dict__.update(__all__=list(names), __getattr__=get)


class VllmModules(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        name = fullname.removeprefix(PACKAGE)
        if name == fullname:
            return None
        if name in OFFERED:
            return ModuleSpec(fullname, _Names(), is_package=not OFFERED[name])
        for refused, instead in REFUSED.items():
            if name == refused or name.startswith(f"{refused}."):
                raise ModuleNotFoundError(f"{fullname} is not supported: {instead}", name=fullname)
        return None


def offer_vllm_modules() -> None:
    if not any(isinstance(finder, VllmModules) for finder in sys.meta_path):
        sys.meta_path.append(VllmModules())
