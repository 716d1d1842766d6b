"""outrider.v1.engine: a package of vLLM; the modules that exist here are inside."""
