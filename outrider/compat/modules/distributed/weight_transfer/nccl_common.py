"""Stands for `vllm.distributed.weight_transfer.nccl_common`: the trainer's end of a connection to a server."""

from outrider.compat.weight_transfer import refuse_name, trainer_init

__all__ = ["trainer_init"]


def __getattr__(name: str) -> object:
    refuse_name(__name__, name)
