"""Writes messages about settings in the names of the flags that a command was given.

Settings are checked in one place for Python, YAML and flags, so their messages say `max_model_len`. On the command line
the same message says `--max-model-len`.
"""

from __future__ import annotations

import argparse
import re


def with_flags(text: str, parser: argparse.ArgumentParser) -> str:
    """Replace the names of settings in a text by the names of this parser's flags.

    A name without an underscore is also an ordinary word (`seed`, `device`), so it is replaced only at the beginning of
    a text that states its allowed values. Names in quotes, in paths and in Python code (`skip_tokenizer_init=True`)
    stay."""
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]  # the others are vLLM's alone
    options = [option for action in shown for option in action.option_strings if option.startswith("--")]
    flags = {option[2:].replace("-", "_"): option for option in options}
    names = sorted(name for name in flags if "_" in name)
    inside = rf"(?<![\w./'\"`-])({'|'.join(names)})(?![\w/'\"`]|\.\w|=(?:True|False|None|\W))" if names else "(?!)"
    first = rf"\A({'|'.join(sorted(flags))})(?= must )"
    return re.sub(f"{first}|{inside}", lambda found: flags[found[0]], text)
