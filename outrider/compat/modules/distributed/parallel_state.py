"""outrider.distributed.parallel_state: one engine uses one device, so that there is nothing to take down."""

__all__ = ["destroy_distributed_environment", "destroy_model_parallel"]


def destroy_model_parallel() -> None:
    """Does nothing. LLM.close gives an engine's memory back."""


def destroy_distributed_environment() -> None:
    """Does nothing. LLM.close gives an engine's memory back."""
