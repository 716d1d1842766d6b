"""Modules of vLLM's package engine. They are on the search path of `outrider.engine`."""
