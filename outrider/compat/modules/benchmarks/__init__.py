"""outrider.benchmarks: a package of vLLM; the modules that exist here are inside."""
