"""Functions by which trainers send weights to a server, under vLLM's names. The server must be one of this package:
both ends of the connection are `outrider.weight_group`. No torch until a trainer joins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Never

IN_PROCESS = ("weights come to an engine in the trainer's own process: use the colocated mode of the trainer "
              "(vllm_mode='colocate'), LLM.update_weights or LLM.start_weight_update")


@dataclass
class TrainerEndpoint:
    """The trainer's end of the connection, as vLLM has it."""

    group: Any  # a WeightGroup


def trainer_init(init_info: Mapping[str, Any]) -> TrainerEndpoint:
    """Listen at the address of `init_info`, until all servers have joined after /init_weight_transfer_engine. With its
    `device`, a GPU, tensors go by NCCL if the servers have other GPUs."""
    module = import_module("outrider.weight_group")
    if init_info["world_size"] < module.NUM_PROCESSES:
        raise ValueError(f"world_size must be at least {module.NUM_PROCESSES}, for the trainer and a server, got "
                         f"{init_info['world_size']}")
    return TrainerEndpoint(module.WeightGroup(init_info["master_address"], init_info["master_port"], module.TRAINER,
                                              init_info["world_size"], device=init_info.get("device")))


def send_weights(iterator: Iterable[Any], group: TrainerEndpoint, src: int = 0,
                 post_iter_func: Callable[[Any], Any] | None = None, **unused: object) -> None:
    """Send tensors in the order in which they were announced to /update_weights. vLLM packs them into buffers, whose
    settings are not needed here."""
    if src != 0:
        raise ValueError(f"src must be 0, the trainer, got {src}")
    for item in iterator:
        group.group.send(item[1] if post_iter_func is None else post_iter_func(item))


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
