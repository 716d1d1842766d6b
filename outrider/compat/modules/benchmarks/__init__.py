"""Stands for the package `vllm.benchmarks`. Only the module in this folder exists."""
