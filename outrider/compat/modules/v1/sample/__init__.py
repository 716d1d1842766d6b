"""outrider.v1.sample: a package of vLLM with modules that are here, too."""
