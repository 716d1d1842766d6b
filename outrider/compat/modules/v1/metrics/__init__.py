"""Stands for the package `vllm.v1.metrics`. Only the modules in this folder exist."""
