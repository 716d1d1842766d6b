"""Stands for `vllm.logger`: the function that makes loggers."""

import logging

__all__ = ["init_logger"]


def init_logger(name: str) -> logging.Logger:
    """Return the logger of this name. The package's own loggers are children of the logger "outrider"."""
    return logging.getLogger(name)
