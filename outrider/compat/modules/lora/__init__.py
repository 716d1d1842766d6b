"""outrider.lora: the place of adapters in vLLM."""
