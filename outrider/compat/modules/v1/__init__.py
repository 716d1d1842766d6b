"""Stands for the package `vllm.v1`. Only the modules in this folder exist."""
