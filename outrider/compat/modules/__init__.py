"""Modules at the places where vLLM has them: each has the package's own names, or raises what to use instead."""
