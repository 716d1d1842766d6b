"""Modules at the places where vLLM has them. Each has the package's own names, or raises an error that says what to
use.
"""
