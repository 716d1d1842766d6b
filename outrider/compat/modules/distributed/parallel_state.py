"""outrider.distributed.parallel_state: ranks are processes of the engine, so that there is nothing to take
down here."""

__all__ = ["destroy_distributed_environment", "destroy_model_parallel"]


def destroy_model_parallel() -> None:
    """Does nothing. LLM.close gives an engine's memory back."""


def destroy_distributed_environment() -> None:
    """Does nothing. LLM.close gives an engine's memory back."""
