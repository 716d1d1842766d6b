"""outrider.usage: a package of vLLM; the module that exists here is inside."""
