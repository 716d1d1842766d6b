"""Stands for the package `vllm.lora`. Only the module in this folder exists."""
