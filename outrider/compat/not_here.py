"""The error of a module that vLLM has and that is not here."""

from __future__ import annotations


def not_here(module: str, instead: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"{module} is not supported: {instead}", name=module)
