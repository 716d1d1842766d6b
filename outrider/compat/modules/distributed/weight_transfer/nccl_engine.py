"""outrider.distributed.weight_transfer.nccl_engine: importable here, with an error at the call."""

from outrider.compat.weight_transfer import refuse_name, refuse_transfer

__all__ = ["NCCLTrainerSendWeightsArgs", "NCCLWeightTransferEngine"]

NCCLTrainerSendWeightsArgs = refuse_transfer("NCCLTrainerSendWeightsArgs")
NCCLWeightTransferEngine = refuse_transfer("NCCLWeightTransferEngine")


def __getattr__(name: str) -> object:
    refuse_name(__name__, name)
