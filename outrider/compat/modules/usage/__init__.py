"""Stands for the package `vllm.usage`. Only the module in this folder exists."""
