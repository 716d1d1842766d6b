"""Stands for `vllm.distributed.weight_transfer`. Trainers import its functions, but an engine in their own process does
not need them."""

from outrider.compat.weight_transfer import refuse_name


def __getattr__(name: str) -> object:
    refuse_name(__name__, name)
