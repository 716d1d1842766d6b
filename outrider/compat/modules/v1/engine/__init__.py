"""Stands for the package `vllm.v1.engine`. Only the modules in this folder exist."""
