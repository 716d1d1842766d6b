"""Stands for the package `vllm.entrypoints`. Only the module in this folder exists."""
