"""Stands for `vllm.distributed.weight_transfer.nccl_engine`. Its names can be imported; calling one raises an error."""

from outrider.compat.weight_transfer import refuse_name, refuse_transfer

__all__ = ["NCCLTrainerSendWeightsArgs", "NCCLWeightTransferEngine"]

NCCLTrainerSendWeightsArgs = refuse_transfer("NCCLTrainerSendWeightsArgs")
NCCLWeightTransferEngine = refuse_transfer("NCCLWeightTransferEngine")


def __getattr__(name: str) -> object:
    refuse_name(__name__, name)
