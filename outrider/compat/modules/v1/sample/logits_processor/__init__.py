"""Stands for `vllm.v1.sample.logits_processor`: exports LogitsProcessor and its types."""

from outrider.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    RequestLogitsProcessor,
    process_dict_updates,
)

__all__ = ["AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor", "MoveDirectionality", "RequestLogitsProcessor",
           "process_dict_updates"]
