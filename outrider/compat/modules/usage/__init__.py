"""outrider.usage: a package of vLLM with a module that is here, too."""
