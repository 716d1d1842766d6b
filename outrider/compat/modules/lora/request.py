"""Stands for `vllm.lora.request`: exports LoRARequest."""

from outrider.lora_request import LoRARequest

__all__ = ["LoRARequest"]
