"""outrider.logger: a function that makes loggers, at vLLM's place."""

import logging

__all__ = ["init_logger"]


def init_logger(name: str) -> logging.Logger:
    """The logger of this name. The package's own loggers are children of the logger "outrider"."""
    return logging.getLogger(name)
