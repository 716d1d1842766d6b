"""The public import of LoRARequest; see docs/adapters.md. The implementation is in `outrider/features/adapters/`."""

from outrider.lora_request import LoRARequest

__all__ = ["LoRARequest"]
