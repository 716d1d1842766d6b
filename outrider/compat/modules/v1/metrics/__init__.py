"""outrider.v1.metrics: a package of vLLM with modules that are here, too."""
