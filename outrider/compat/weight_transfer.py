"""Functions that send weights to a vLLM server by NCCL. Trainers import them even if they run in the engine's process.
Calling one raises an error that says how to give weights to an engine here. No torch."""

from __future__ import annotations

from typing import Any, Never

IN_PROCESS = ("weights come to an engine in the trainer's own process: use the colocated mode of the trainer "
              "(vllm_mode='colocate'), LLM.update_weights or LLM.start_weight_update")


def refuse_transfer(name: str) -> Any:
    """Make a function with a name of vLLM. Calling it raises an error."""
    def refused(*args: object, **settings: object) -> Never:
        raise NotImplementedError(f"{name} is not supported: {IN_PROCESS}")

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Not supported: {IN_PROCESS}."
    return refused


def refuse_name(module: str, name: str) -> Never:
    """Raise the error for a name that a module of weight transfer does not have."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"{module}.{name} is not supported: {IN_PROCESS}")
