"""Modules under the names that they have in vLLM. Each contains the package's own objects, or raises an error that says
what to use instead."""
