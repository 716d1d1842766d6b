"""outrider.v1: a package of vLLM with modules that are here, too."""
