"""Stands for `vllm.distributed.parallel_state`: functions that do nothing, because the engine starts and ends its ranks
itself."""

__all__ = ["destroy_distributed_environment", "destroy_model_parallel"]


def destroy_model_parallel() -> None:
    """Do nothing. LLM.close frees an engine's memory."""


def destroy_distributed_environment() -> None:
    """Do nothing. LLM.close frees an engine's memory."""
