"""outrider.benchmarks: a package of vLLM with modules that are here, too."""
