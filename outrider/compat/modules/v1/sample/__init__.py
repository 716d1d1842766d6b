"""outrider.v1.sample: a package of vLLM; the modules that exist here are inside."""
