"""outrider.v1.metrics: a package of vLLM; the modules that exist here are inside."""
