"""outrider.lora.request: the place of LoRARequest in vLLM."""

from outrider.adapters.request import LoRARequest

__all__ = ["LoRARequest"]
