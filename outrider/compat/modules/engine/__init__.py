"""Modules of vLLM's package engine. They lie on the search path of `outrider.engine`."""
