"""Modules of vLLM's package `vllm.engine`. They are on the search path of `outrider.engine`."""
