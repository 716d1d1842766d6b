"""Stands for `vllm.distributed.weight_transfer.packed_tensor`: sends weights to a server. The function that would
receive them can be imported; calling it raises an error."""

from outrider.compat.weight_transfer import refuse_name, refuse_transfer
from outrider.compat.weight_transfer import send_weights as packed_nccl_broadcast_producer

__all__ = ["packed_nccl_broadcast_producer", "packed_nccl_broadcast_consumer"]

packed_nccl_broadcast_consumer = refuse_transfer("packed_nccl_broadcast_consumer")


def __getattr__(name: str) -> object:
    refuse_name(__name__, name)
