"""Stands for `vllm.distributed.weight_transfer.nccl_common`. Its names can be imported; calling one raises an error."""

from outrider.compat.weight_transfer import refuse_name, refuse_transfer

__all__ = ["trainer_init"]

trainer_init = refuse_transfer("trainer_init")


def __getattr__(name: str) -> object:
    refuse_name(__name__, name)
