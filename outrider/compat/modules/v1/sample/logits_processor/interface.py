"""Stands for `vllm.v1.sample.logits_processor.interface`: exports LogitsProcessor and its types."""

from outrider.logits_processors import BatchUpdate, LogitsProcessor, MoveDirectionality

__all__ = ["BatchUpdate", "LogitsProcessor", "MoveDirectionality"]
