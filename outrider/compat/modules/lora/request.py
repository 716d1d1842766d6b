"""outrider.lora.request: the place of LoRARequest in vLLM."""

from outrider.lora_request import LoRARequest

__all__ = ["LoRARequest"]
