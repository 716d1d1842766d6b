"""Stands for `vllm.v1.sample.logits_processor.builtin`: a helper for processors."""

from outrider.logits_processors import process_dict_updates

__all__ = ["process_dict_updates"]
