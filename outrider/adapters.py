"""LoRARequest under its public name: docs/adapters.md. The feature lies in `outrider/features/adapters/`."""

from outrider.lora_request import LoRARequest

__all__ = ["LoRARequest"]
