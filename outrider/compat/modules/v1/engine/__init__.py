"""outrider.v1.engine: a package of vLLM with modules that are here, too."""
