"""Stands for `vllm.utils.argparse_utils`: exports FlexibleArgumentParser."""

from outrider.compat.argument_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
