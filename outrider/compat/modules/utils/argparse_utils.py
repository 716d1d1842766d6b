"""outrider.utils.argparse_utils: the place of FlexibleArgumentParser in vLLM."""

from outrider.compat.argument_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
