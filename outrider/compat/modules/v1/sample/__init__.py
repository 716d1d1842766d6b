"""Stands for the package `vllm.v1.sample`. Only the modules in this folder exist."""
