"""outrider.v1.sample.logits_processor: the place of LogitsProcessor in vLLM."""

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
