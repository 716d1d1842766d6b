"""outrider.v1.sample.logits_processor.builtin: names at the place where vLLM has them."""

from outrider.logits_processors import process_dict_updates

__all__ = ["process_dict_updates"]
