"""outrider.v1.sample.logits_processor.interface: names at the place where vLLM has them."""

from outrider.logits_processors import BatchUpdate, LogitsProcessor, MoveDirectionality

__all__ = ["BatchUpdate", "LogitsProcessor", "MoveDirectionality"]
