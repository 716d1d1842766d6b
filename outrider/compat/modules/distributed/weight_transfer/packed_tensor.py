"""Stands for `vllm.distributed.weight_transfer.packed_tensor`. Its names can be imported; calling one raises an
error."""

from outrider.compat.weight_transfer import refuse_name, refuse_transfer

__all__ = ["packed_nccl_broadcast_producer", "packed_nccl_broadcast_consumer"]

packed_nccl_broadcast_producer = refuse_transfer("packed_nccl_broadcast_producer")
packed_nccl_broadcast_consumer = refuse_transfer("packed_nccl_broadcast_consumer")


def __getattr__(name: str) -> object:
    refuse_name(__name__, name)
