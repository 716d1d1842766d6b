"""outrider.logger: loggers at the place where vLLM makes them."""

import logging

__all__ = ["init_logger"]


def init_logger(name: str) -> logging.Logger:
    """The logger of that name. Those of the package are children of the logger "outrider"."""
    return logging.getLogger(name)
