"""outrider.distributed.weight_transfer.packed_tensor: importable here, with an error at the call."""

from outrider.compat.weight_transfer import refuse_name, refuse_transfer

__all__ = ["packed_nccl_broadcast_producer", "packed_nccl_broadcast_consumer"]

packed_nccl_broadcast_producer = refuse_transfer("packed_nccl_broadcast_producer")
packed_nccl_broadcast_consumer = refuse_transfer("packed_nccl_broadcast_consumer")


def __getattr__(name: str) -> object:
    refuse_name(__name__, name)
